"use strict";

// While a request runs, the page still shows the pair that was decided: keys wait for the next one, clicks do nothing.
const KEYS = /^([kducmza?1-9]|ArrowLeft|ArrowRight)$/;
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
  if (target.matches("summary")) write(target.parentElement);
  return true;
}

// What is written takes the place of the old caption; an arrow key keeps it to be edited.
function write(form) {
  const text = form.querySelector("textarea");
  if (!form.open || document.activeElement === text) return; // not again, over letters that have come since
  text.focus();
  text.select();
}
document.addEventListener("toggle", (event) => { if (event.target.matches(".rewrite")) write(event.target); }, true);

// Returns whether the key was one of the form's own.
function writeKey(event, form) {
  if (event.isComposing) return false; // the key belongs to the input method
  if (event.key === "Escape") {
    form.querySelector("form").reset();
    form.open = false;
    form.querySelector("summary").focus();
    return true;
  }
  if (event.key !== "Enter" || event.shiftKey || !event.target.matches("textarea")) return false;
  if (!busy && !event.repeat) form.querySelector("form").requestSubmit();
  return true;
}

document.addEventListener("DOMContentLoaded", () => settled(true)); // htmx was here first
let decided = null; // the pair that a decision is being sent on
const pair = () => document.querySelector("article")?.getAttribute("aria-label");
document.addEventListener("htmx:beforeRequest", (event) => {
  busy = true;
  decided = event.detail.pathInfo.requestPath === "/decide" ? pair() : null;
});
document.addEventListener("htmx:afterSwap", () => {
  if (decided && decided === pair()) waiting.length = 0; // it was the last one; what is pressed from now on is for it
});
document.addEventListener("htmx:afterSettle", () => settled(true));
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
  const form = event.target.closest(".rewrite[open]");
  if (form && writeKey(event, form)) return event.preventDefault();
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
