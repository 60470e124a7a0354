"use strict";
// Chat through /v1/chat/completions; the pool through /v1/dashboard, once a second while the page is visible.
const $ = (id) => document.getElementById(id);
const messages = [];
let answering = null;
let conversation = 0;  // counts those that were begun anew; what is left of an answer to an earlier one is dropped
let shown = null;

const headers = () => {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
};

async function errorText(response) {
  if (response.status === 401) { $("key-box").open = true; return "This server needs an API key."; }
  try { return (await response.json()).error.message; } catch { return "The server answered " + response.status + "."; }
}

// ---- chat
function addMessage(role, text) {
  const box = document.createElement("div");
  box.className = "message " + role;
  const who = document.createElement("b");
  who.textContent = { user: "You", assistant: "Model", error: "Error" }[role];
  const thought = document.createElement("span");
  thought.className = "thought";
  const body = document.createElement("span");
  body.textContent = text;
  box.append(who, thought, body);
  $("messages").append(box);
  $("messages").scrollTop = $("messages").scrollHeight;
  return { box, thought, body };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      const line = held.slice(0, end);
      held = held.slice(end + 2);
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function ask(text) {
  const mine = conversation;
  messages.push({ role: "user", content: text });
  addMessage("user", text);
  const view = addMessage("assistant", "");
  $("messages").setAttribute("aria-busy", "true");
  answering = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  let answer = "", tokens = 0, first = null, last = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), signal: answering.signal,
      body: JSON.stringify({
        messages, stream: true, stream_options: { include_usage: true },
        temperature: Number($("temperature").value) || 0, max_tokens: Math.max(1, Math.floor(Number($("limit").value)) || 512),
      }),
    });
    if (!response.ok) throw new Error(await errorText(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      const box = $("messages"), follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      const delta = event.choices.length ? event.choices[0].delta : {};
      if (delta.reasoning_content) view.thought.textContent += delta.reasoning_content;
      if (delta.content) { answer += delta.content; view.body.textContent = answer; }
      if (delta.content || delta.reasoning_content) { last = performance.now(); first = first ?? last; }
      if (follows) $("messages").scrollTop = $("messages").scrollHeight;
    }
    if (tokens > 1 && last > first) {
      const rate = document.createElement("span");
      rate.className = "rate";
      rate.textContent = tokens + " tokens, " + ((tokens - 1) * 1000 / (last - first)).toFixed(1) + " per second";
      view.box.append(rate);
    }
  } catch (error) {
    if (error.name !== "AbortError" && mine === conversation) addMessage("error", error.message);
    if (!answer) view.box.remove();
  }
  if (mine === conversation) {
    if (answer) messages.push({ role: "assistant", content: answer }); else messages.pop();
  }
  answering = null;
  $("messages").setAttribute("aria-busy", "false");
  $("send").disabled = false;
  $("stop").disabled = true;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("question").value.trim();
  if (!text || answering) return;
  $("question").value = "";
  ask(text);
  $("question").focus();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => { if (answering) answering.abort(); $("question").focus(); });
$("reset").addEventListener("click", () => {
  if (answering) answering.abort();
  conversation += 1;
  messages.length = 0;
  $("messages").textContent = "";
  $("question").focus();
});
$("key").addEventListener("change", () => { sessionStorage.setItem("rimuru-key", $("key").value); refresh(); });
$("key").value = sessionStorage.getItem("rimuru-key") || "";

// ---- memory
const human = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i += 1; }
  return n.toFixed(i && n < 100 ? 1 : 0) + " " + units[i];
};
const KINDS = { e: "experts (by layer)", b: "loading buffers", r: "requests", p: "prefixes kept for reuse", s: "SSM states kept", c: "conv states kept" };
const kindOf = (owner) => owner[0];

function color(owner, layers) {
  const number = Number(owner.slice(1));
  switch (kindOf(owner)) {
    case "e": return `hsl(${200 + 70 * (number / Math.max(1, layers - 1))} 60% ${number % 2 ? 52 : 60}%)`;
    case "r": return `hsl(${(5 + number * 37) % 100} 85% 48%)`;
    case "b": return "#8a8f9f";
    case "p": return "#cbb994";
    case "s": return "#2a9d6f";
    default: return "#c0508f";
  }
}

function nameOf(owner) {
  const number = owner.slice(1);
  return { e: "experts of layer " + number, r: "request " + number }[kindOf(owner)] || KINDS[kindOf(owner)];
}

// The largest square cells with which the picture stays within PICTURE_HEIGHT.
const PICTURE_HEIGHT = 240, LARGEST_CELL = 96, SMALLEST_CELL = 3;
function layoutOf(n, width) {
  let size = LARGEST_CELL;
  const columns = () => Math.max(1, Math.floor(width / size));
  while (size > SMALLEST_CELL && Math.ceil(n / columns()) * size > PICTURE_HEIGHT) size -= 1;
  return { columns: columns(), size };
}

function drawPool(state) {
  const canvas = $("pool"), cells = state.pool.cells, width = canvas.clientWidth || 300, scale = window.devicePixelRatio || 1;
  const { columns, size } = layoutOf(cells.length, width);
  const height = Math.max(size, Math.ceil(cells.length / columns) * size);
  canvas.width = width * scale;
  canvas.height = height * scale;
  const g = canvas.getContext("2d");
  g.scale(scale, scale);
  const free = getComputedStyle(document.documentElement).getPropertyValue("--free");
  const layers = state.memory.resident_experts.length, gap = size > 5 ? 1 : 0;
  cells.forEach((parts, i) => {
    const x = (i % columns) * size, y = Math.floor(i / columns) * size, side = size - gap;
    g.fillStyle = free;
    g.fillRect(x, y, side, side);
    let at = 0;
    for (const [owner, share] of parts) {
      g.fillStyle = color(owner, layers);
      g.fillRect(x, y + at * side, side, Math.max(share * side, 0.5));
      at += share;
    }
  });
  shown = { state, columns, size };
}

function describePool(state) {
  const total = {}, n = state.pool.cells.length;
  for (const parts of state.pool.cells) for (const [owner, share] of parts) total[kindOf(owner)] = (total[kindOf(owner)] || 0) + share;
  const legend = $("legend"), texts = [];
  legend.textContent = "";
  let used = 0;
  const layers = state.memory.resident_experts.length;
  for (const kind of Object.keys(KINDS)) {
    if (!total[kind]) continue;
    used += total[kind];
    texts.push([KINDS[kind], total[kind] / n, color(kind + (kind === "e" ? Math.floor(layers / 2) : "1"), layers)]);
  }
  texts.push(["free", 1 - used / n, getComputedStyle(document.documentElement).getPropertyValue("--free")]);
  for (const [text, share, paint] of texts) {
    const item = document.createElement("li");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 1 1");
    svg.setAttribute("aria-hidden", "true");
    const square = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    square.setAttribute("width", "1");
    square.setAttribute("height", "1");
    square.setAttribute("fill", paint);
    svg.append(square);
    item.append(svg, `${text} ${(100 * share).toFixed(1)}%`);
    legend.append(item);
  }
  $("pool-text").textContent = "The pool's pages belong to: " + texts.map(([t, s]) => `${t} ${(100 * s).toFixed(0)} percent`).join(", ") + ".";
  const each = state.pool.huge_per_cell > 1 ? `${state.pool.huge_per_cell} huge pages` : "one huge page";
  $("pool-size").textContent = `${state.pool.n_huge} huge pages of ${human(state.pool.huge_bytes)}; a cell is ${each}.`;
}

function showNumbers(state) {
  const memory = state.memory, experts = memory.resident_experts.reduce((a, b) => a + b, 0);
  const rows = [
    ["Running", state.running], ["Waiting", state.waiting], ["Tokens per second", state.tokens_per_second.toFixed(1)],
    ["Tokens answered", state.output_tokens.toLocaleString("en")], ["Memory", human(memory.total_bytes)], ["Free in the pool", human(memory.free_bytes)],
  ];
  if (memory.resident_experts.length) {
    rows.push(["Resident experts", experts.toLocaleString("en")]);
    if (state.hit_rate !== null) rows.push(["Expert hit rate", (100 * state.hit_rate).toFixed(1) + "%"]);
    rows.push([state.device === "cpu" ? "Expert bytes read" : "Bytes over PCIe", human(state.read_bytes)]);
  }
  rows.push(["Prompt tokens reused", state.prompt_tokens ? (100 * state.cached_tokens / state.prompt_tokens).toFixed(0) + "%" : "–"]);
  const list = $("numbers");
  if (list.children.length !== rows.length) {
    list.textContent = "";
    for (const [name] of rows) {
      const box = document.createElement("div"), term = document.createElement("dt"), value = document.createElement("dd");
      term.textContent = name;
      box.append(term, value);
      list.append(box);
    }
  }
  rows.forEach(([name, value], i) => { list.children[i].firstChild.textContent = name; list.children[i].lastChild.textContent = value; });
}

function showChanges(changes) {
  const list = $("changes");
  list.textContent = "";
  for (const change of changes) {
    const item = document.createElement("li"), when = document.createElement("time"), date = new Date(change.time * 1000);
    when.dateTime = date.toISOString();
    when.textContent = date.toLocaleTimeString();
    item.append(when, change.text);
    list.append(item);
  }
}

function setStatus(text) { if ($("status").textContent !== text) $("status").textContent = text; }

async function refresh() {
  try {
    const response = await fetch("v1/dashboard", { headers: headers() });
    if (!response.ok) { setStatus(await errorText(response)); return false; }
    const state = await response.json();
    $("model").textContent = `${state.model} · ${state.architecture} · ${state.device} · context ${state.context} tokens`;
    setStatus(state.draining ? "The server is shutting down." : "");
    showNumbers(state);
    drawPool(state);
    describePool(state);
    showChanges(state.changes);
    return true;
  } catch { setStatus("The server does not answer."); return false; }
}

const POINT_AT_IT = $("pool-cell").textContent;
let chosen = -1;  // the cell that was told of last
function tellCell(index) {
  const parts = shown.state.pool.cells[index];
  chosen = parts === undefined ? -1 : index;
  $("pool-cell").textContent = parts === undefined ? POINT_AT_IT
    : `Cell ${index}: ` + (parts.map(([owner, share]) => `${nameOf(owner)} ${(100 * share).toFixed(0)}%`).join(", ") || "free");
}
function pointAt(event) {
  if (!shown) return;
  const box = $("pool").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / shown.size), row = Math.floor((event.clientY - box.top) / shown.size);
  tellCell(column < shown.columns ? row * shown.columns + column : -1);
}
$("pool").addEventListener("pointermove", pointAt);
$("pool").addEventListener("pointerdown", pointAt);
$("pool").addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") $("pool-cell").textContent = POINT_AT_IT; });
$("pool").addEventListener("keydown", (event) => {
  if (!shown || event.ctrlKey || event.altKey || event.metaKey) return;
  const last = shown.state.pool.cells.length - 1;
  const to = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, ArrowDown: chosen < 0 ? 0 : chosen + shown.columns,
    ArrowUp: chosen - shown.columns, Home: 0, End: last }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  if (to >= 0 && to <= last) tellCell(to);
});
window.addEventListener("resize", () => { if (shown) drawPool(shown.state); });

async function poll() {
  const well = document.hidden || await refresh();
  setTimeout(poll, well ? 1000 : 4000);
}
poll();
