"use strict";

// While a request runs, the page still shows the pair that was decided: keys wait for the next one, clicks do nothing.
const KEYS = /^([kducza?1-9]|ArrowLeft|ArrowRight)$/;
let busy = true; // until htmx is ready
const waiting = [];

function settled(ended) {
  busy = false;
  if (!ended) waiting.length = 0; // what was meant for the next pair must not reach this one
  while (!busy && waiting.length) click(waiting.shift());
}

function press(key) {
  if (busy) {
    // After c come the letters of a caption, and after ? the help is open: neither decides anything.
    if (!["c", "?"].includes(waiting.at(-1))) waiting.push(key);
    return true;
  }
  return click(key);
}

function click(key) {
  const target = document.querySelector(`[data-key="${CSS.escape(key)}"]`);
  if (!target) return false;
  target.click();
  if (target.matches("summary") && target.parentElement.open) target.parentElement.querySelector("textarea").focus();
  return true;
}

document.addEventListener("DOMContentLoaded", () => settled(true)); // htmx was here first
let decided = null; // the pair that a decision is being sent on
const pair = () => document.querySelector("article")?.getAttribute("aria-label");
document.addEventListener("htmx:beforeRequest", (event) => {
  busy = true;
  decided = event.detail.pathInfo.requestPath === "/decide" ? pair() : null;
});
document.addEventListener("htmx:afterSettle", () => settled(!decided || decided !== pair())); // or it was the last one
document.addEventListener("htmx:afterRequest", (event) => { if (!event.detail.successful) settled(false); });
document.addEventListener("click", (event) => {
  if (busy && event.target.closest("#main button, #main a")) {
    event.preventDefault();
    event.stopPropagation();
  }
}, true);
document.addEventListener("submit", (event) => {
  if (event.target.matches("[hx-post]")) event.preventDefault(); // only htmx sends these
});

// A key presses the button or link that carries it. Not while somebody writes.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const writing = event.target.closest("input:not([type=checkbox]), textarea, select");
  if (event.key === "Escape" && writing) writing.blur();
  if (writing || document.querySelector("dialog[open]")) return;
  if (event.key === " " && event.target.closest("button, a, summary, input")) return;
  if (event.repeat && !event.key.startsWith("Arrow")) return; // a key that is held must not decide on pairs unseen
  if (KEYS.test(event.key) && press(event.key)) event.preventDefault();
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
