"use strict";

// A key presses the button or link that carries it. Not while somebody writes.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const writing = event.target.closest("input:not([type=checkbox]), textarea, select");
  if (event.key === "Escape" && writing) writing.blur();
  if (writing || document.querySelector("dialog[open]")) return;
  if (event.key === " " && event.target.closest("button, a, summary, input")) return;
  const target = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (!target) return;
  event.preventDefault();
  target.click();
  if (target.matches("summary") && target.parentElement.open) target.parentElement.querySelector("textarea").focus();
});

document.addEventListener("click", (event) => {
  const action = event.target.closest("[data-action]")?.dataset.action;
  if (action === "help") document.getElementById("help").showModal();
  if (action === "all") {
    const boxes = [...document.querySelectorAll("input[name=row]")];
    const all = boxes.every((box) => box.checked);
    for (const box of boxes) box.checked = !all;
    count();
  }
});

// Shift and a click select everything in between.
let last = null;
document.addEventListener("click", (event) => {
  if (!event.target.matches("input[name=row]")) return;
  const boxes = [...document.querySelectorAll("input[name=row]")];
  if (event.shiftKey && boxes.includes(last)) {
    const [from, to] = [boxes.indexOf(last), boxes.indexOf(event.target)].sort((a, b) => a - b);
    for (const box of boxes.slice(from, to + 1)) box.checked = event.target.checked;
  }
  last = event.target;
});

function count() {
  const place = document.querySelector(".selected");
  if (place) place.textContent = `${document.querySelectorAll("input[name=row]:checked").length} selected`;
}
document.addEventListener("change", count);

function problem(text) {
  const place = document.getElementById("problem");
  place.textContent = text;
  place.hidden = !text;
}

document.addEventListener("htmx:configRequest", (event) => {
  const form = event.target.closest("form");
  if (event.detail.path === "/decide" && form?.id === "decide" && !form.querySelector("input[name=row]:checked")) {
    event.preventDefault();
    problem("Select at least one pair first.");
  }
});
document.addEventListener("htmx:beforeSwap", () => problem(""));
document.addEventListener("htmx:responseError", (event) => problem(event.detail.xhr.responseText || "The server refused this."));
document.addEventListener("htmx:sendError", () => problem("The server does not answer; nothing was written. Is it still running?"));
document.addEventListener("htmx:afterSwap", () => {
  document.getElementById("main")?.focus({ preventScroll: true });
  if (document.getElementById("main")?.dataset.view === "one") window.scrollTo(0, 0);
});
