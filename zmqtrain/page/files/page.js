// Shows the page of a run: takes the server's events, one object a second, and draws tables and charts of it.
//
// Rule 1: what comes is put into the page as text (textContent), never as markup; texts for plotly, which reads some
// markup, go through `plain`.  Rule 2: nothing is computed here but where a point lies; all words come made.
"use strict";

const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#e5484d", "#8b5cf6", "#06b6d4", "#ec4899", "#84cc16", "#f97316", "#6e7bf2"];
const LANES = ["versions", "hub", "deltas", "nodes"];
const MARKS = {
  joined: ["nodes", "good", "triangle-up"], again: ["nodes", "good", "triangle-right"], left: ["nodes", "gone", "triangle-down"],
  lost: ["nodes", "bad", "x"], killed: ["nodes", "bad", "x"],
  refused: ["deltas", "warning", "circle-open"], quarantined: ["deltas", "bad", "octagon"],
  acquitted: ["deltas", "good", "circle"], "taken back": ["deltas", "bad", "arrow-left"],
  released: ["versions", "accent", "line-ns-open"],
  "broker lost": ["hub", "bad", "x"], "broker found": ["hub", "good", "triangle-up"], takeover: ["hub", "bad", "star"],
  checkpoint: ["hub", "accent", "diamond"],
};
const OTHER_MARK = ["hub", "soft", "square"];
const FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const MANY_NODES = 12, MOST_LISTED = 200;
const ROUTINE = new Set(["released", "checkpoint"]), MOST_ROUTINE = 500, MOST_EVENTS = 2000;  // as in picture.py
const STATES = { live: "live", lost: "broker lost", reading: "reading", recorded: "recorded", ended: "ended", offline: "page ended" };

const TASKS = { forward: "accent", backward: "good", update: "warning" };
const run = { lines: new Map(), events: [], rows: [], pipelines: [], tick: -1, frame: null };
const element = (id) => document.getElementById(id);
let chosen = null, drawnAt = -Infinity, drawing = 0;

// ---------------------------------------------------------------- what comes

function take(frame) {
  if (frame.whole) {
    run.lines.clear();
    run.events = [];
  }
  for (const [id, change] of Object.entries(frame.lines)) {
    const line = run.lines.get(id) ?? { times: [], values: [] };
    Object.assign(line, { ...change, times: line.times, values: line.values });
    if (change.times) {
      line.times.splice(change.first, Infinity, ...change.times);
      line.values.splice(change.first, Infinity, ...change.values);
    }
    run.lines.set(id, line);
  }
  const last = run.events.length ? run.events[run.events.length - 1].number : -1;
  run.events.push(...frame.events.filter((event) => event.number > last));
  thinEvents();
  if (frame.pipelines) {
    run.pipelines = frame.pipelines;
    showPipelines();
  }
  run.frame = frame;
}

/** Leave out every second routine event where there are too many, and the oldest of the others. */
function thinEvents() {
  const routine = run.events.filter((event) => ROUTINE.has(event.what));
  const others = run.events.length - routine.length;
  if (routine.length <= MOST_ROUTINE && others <= MOST_EVENTS) return;
  const gone = new Set();
  if (routine.length > MOST_ROUTINE) routine.slice(1, -1).forEach((event, index) => { if (index % 2 === 0) gone.add(event.number); });
  let over = others - MOST_EVENTS;
  run.events = run.events.filter((event) => !gone.has(event.number) && (ROUTINE.has(event.what) || over-- <= 0));
}

function listen() {
  const source = new EventSource("events");
  source.onmessage = (message) => {
    take(JSON.parse(message.data));
    showTexts();
    drawSoon();
  };
  source.onerror = () => {
    showState("offline");
    showNote(source.readyState === EventSource.CLOSED
      ? "The server of this page refuses it: open the address that zmqtrain page has printed."
      : "The process of this page does not answer; it is looked for again. The run goes on without it.");
  };
}

// ---------------------------------------------------------------- texts and tables

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function make(kind, name, text) {
  const node = document.createElement(kind);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** Make `parent` have as many children as `count`, made by `one`. */
function resize(parent, count, one) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) parent.append(one());
}

function showState(state) {
  element("state").dataset.state = state;
  setText(element("state"), STATES[state] ?? state);
}

function showNote(text) {
  element("note").hidden = !text;
  setText(element("note"), text);
}

function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds)), two = (number) => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function showTexts() {
  const { heading, tiles, sentences, hub } = run.frame;
  setText(element("title"), heading.title || "zmqtrain");
  setText(element("where"), [heading.run, heading.source].filter(Boolean).join(" · "));
  const title = `${heading.title || "run"} · zmqtrain`;
  if (document.title !== title) document.title = title;
  showState(heading.state);
  showNote(heading.note);
  showTiles(tiles);
  resize(element("sentences"), sentences.length, () => make("p"));
  sentences.forEach((text, index) => setText(element("sentences").children[index], text));
  showNodes();
  const body = element("hub").tBodies[0];
  resize(body, hub.length, () => {
    const row = make("tr"), name = make("th");
    name.scope = "row";
    row.append(name, make("td"));
    return row;
  });
  hub.forEach(([name, text], index) => {
    setText(body.rows[index].cells[0], name);
    setText(body.rows[index].cells[1], text);
  });
  showEvents();
}

function showTiles(tiles) {
  resize(element("tiles"), tiles.length, () => {
    const tile = make("div", "tile");
    tile.append(make("div", "name"), make("div", "figure"), make("div", "below"));
    return tile;
  });
  tiles.forEach((tile, index) => {
    const node = element("tiles").children[index];
    setText(node.children[0], tile.name);
    setText(node.children[1], tile.figure);
    setText(node.children[2], tile.below);
    node.title = tile.hint || `${tile.figure} ${tile.below}`;
    node.dataset.tone = tile.tone;
  });
}

function colourOf(key) {
  return COLOURS[Number(key) % COLOURS.length];
}

function showNodes() {
  const { columns, rows } = run.frame, table = element("nodes"), head = table.tHead.rows[0];
  const titles = [["node", ""], ...columns, ["", ""]];
  resize(head, titles.length, () => {
    const cell = make("th");
    cell.scope = "col";
    return cell;
  });
  titles.forEach(([title, meaning], index) => {
    setText(head.cells[index], title);
    if (meaning) head.cells[index].title = meaning;
  });
  resize(table.tBodies[0], rows.length, makeNodeRow);
  rows.forEach((row, index) => showNode(table.tBodies[0].rows[index], row, columns.length));
}

function makeNodeRow() {
  const row = make("tr"), name = make("th");
  name.scope = "row";
  name.append(make("span", "dot"), make("span", "name"));
  row.append(name);
  row.tabIndex = 0;
  row.onclick = () => choose(row.dataset.key);
  row.onkeydown = (event) => { if (event.key === "Enter") choose(row.dataset.key); };
  return row;
}

function showNode(node, row, columns) {
  node.dataset.key = row.key;
  node.dataset.state = row.state;
  node.classList.toggle("chosen", chosen === row.key);
  node.cells[0].firstChild.style.background = colourOf(row.key);
  setText(node.cells[0].lastChild, row.name);
  node.cells[0].lastChild.title = row.name;
  while (node.cells.length > columns + 2) node.lastElementChild.remove();
  while (node.cells.length < columns + 2) node.append(make("td"));
  for (let index = 0; index < columns; index++) setText(node.cells[index + 1], row.cells[index] ?? "–");
  const last = node.cells[columns + 1], said = [...row.chips, row.text].join("\n");
  if (last.dataset.said !== said) {
    last.dataset.said = said;
    last.replaceChildren(...row.chips.map((chip) => make("span", "chip", chip)), make("span", "said", row.text));
  }
}

function choose(key) {
  chosen = chosen === key ? null : key;
  const row = run.frame.rows.find((one) => one.key === chosen);
  setText(element("chosen"), row ? `only ${row.name} is in colour: click its row again for all` : "");
  showNodes();
  draw();
}

function showEvents() {
  const all = element("routine").checked;
  const events = run.events.filter((event) => all || !ROUTINE.has(event.what)).slice(-MOST_LISTED).reverse();
  const body = element("events").tBodies[0];
  resize(body, events.length, () => {
    const row = make("tr");
    row.append(make("td"), make("td", "what"), make("td"), make("td"));
    return row;
  });
  events.forEach((event, index) => {
    const cells = body.rows[index].cells;
    [clock(event.seconds), event.what, event.node, event.text].forEach((text, column) => setText(cells[column], text));
  });
}

function showPipelines() {
  const select = element("pipeline"), { length } = run.pipelines, newest = select.selectedIndex === select.options.length - 1;
  element("pipelines").hidden = !length;
  select.hidden = length < 2;
  resize(select, length, () => make("option"));
  run.pipelines.forEach((one, index) => setText(select.options[index], one.name));
  if (newest) select.selectedIndex = length - 1;
  if (element("pipeline-key").children.length) return;
  element("pipeline-key").replaceChildren(...Object.entries(TASKS).map(([kind, tone]) => {
    const sign = make("span", "kind", kind);
    sign.style.setProperty("--of-kind", `var(--${tone})`);
    return sign;
  }));
}

// ---------------------------------------------------------------- charts

/** Return a text in which plotly reads no markup and no variables. */
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("%{", "%\u200b{");
}

function drawSoon() {
  const wait = run.lines.size > 24 ? 3000 : 900;  // many lines take the browser a while
  if (drawing || document.hidden) return;
  drawing = setTimeout(() => { drawing = 0; draw(); }, Math.max(0, drawnAt + wait - performance.now()));
}

function unitOf(seconds) {
  if (seconds > 7200) return [3600, "hours"];
  return seconds > 300 ? [60, "minutes"] : [1, "seconds"];
}

function samplesAt(line, time) {
  const { times, values } = line;
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] + line.shift <= time) low = middle + 1; else high = middle;
  }
  if (!low) return 0;
  if (low === times.length) return values[low - 1];
  const part = (time - times[low - 1] - line.shift) / (times[low] - times[low - 1]);
  return values[low - 1] + part * (values[low] - values[low - 1]);
}

function draw() {
  if (!window.Plotly || !run.frame) return;
  drawnAt = performance.now();
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const lines = [...run.lines.values()].filter((line) => line.times.length);
  const losses = lines.filter((line) => line.kind !== "samples");
  const samples = lines.find((line) => line.kind === "samples");
  const end = Math.max(0, ...lines.map((line) => line.times[line.times.length - 1] + line.shift), ...run.events.map((event) => event.seconds));
  const [unit, unitName] = unitOf(end);
  const curves = (at) => losses.map((line) => curveOf(line, line.times.map((time) => at(time + line.shift)), colour));
  if (losses.length) drawChart("by-seconds", curves((time) => time / unit), unitName, colour);
  else setEmpty("by-seconds", "No loss is known yet.");
  if (losses.length && samples) drawChart("by-samples", curves((time) => samplesAt(samples, time)), "samples", colour);
  else if (losses.length) setEmpty("by-samples", "No version is recorded yet, or the broker's record is not here.");
  else setEmpty("by-samples", "No loss is known yet.");
  element("charts").hidden = element("key").hidden = run.pipelines.length > 0 && !losses.length;  // a pipeline alone
  if (run.events.length) drawTimeline(unit, unitName, end, colour);
  else setEmpty("timeline", "Nothing has happened yet.");
  if (run.pipelines.length) drawPipeline(run.pipelines[Math.max(0, element("pipeline").selectedIndex)], colour);
}

/** Show a text in place of a chart, also of one that was drawn of another run. */
function setEmpty(id, text) {
  if (!element(id).querySelector(".empty")) {
    Plotly.purge(id);
    element(id).replaceChildren(make("p", "empty"));
  }
  setText(element(id).querySelector(".empty"), text);
}

function curveOf(line, x, colour) {
  const shared = line.kind === "evaluation", many = run.frame.rows.length > MANY_NODES;
  const faded = chosen !== null && !shared && line.key !== chosen;
  const node = run.frame.rows.find((row) => row.key === line.key);
  const gone = node && (node.state === "lost" || node.state === "left");
  return {
    x, y: line.values, type: "scatter", mode: x.length < 2 ? "markers" : "lines", name: plain(line.name),
    line: { width: shared ? 3.6 : 1.3, color: shared ? colour("text") : faded || gone ? colour("gone") : colourOf(line.key) },
    marker: { size: 5 }, opacity: shared ? 1 : faded ? 0.25 : many ? 0.55 : 0.85,
    hovertemplate: `%{y:.5g}<extra>${plain(line.name)}</extra>`,
  };
}

const CONFIG = { displaylogo: false, responsive: true, scrollZoom: false, displayModeBar: "hover", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

/** Return the range of an axis: from 0, unless all that is drawn lies far behind it and is of different times. */
function spanOf(first, last) {
  const begin = first > 0.2 * last && last - first > 0.001 * last ? first : 0;
  const width = last - begin;
  return width > 0 ? [begin - 0.01 * width, last + 0.01 * width] : [begin - 0.01, begin + 1];
}

function layoutOf(colour, title, span) {
  const axis = { gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, uirevision: "kept", hovermode: "closest",
    margin: { l: 46, r: 14, t: 8, b: 36 }, font: { family: FONT, size: 12, color: colour("soft") },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text"), family: FONT }, align: "left", namelength: 40 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("gone"), activecolor: colour("text") },
    xaxis: { ...axis, title: { text: title, standoff: 4 }, range: span }, yaxis: { ...axis },
  };
}

function drawChart(id, curves, title, colour) {
  element(id).querySelector(".empty")?.remove();
  const log = element("log").checked, ends = curves.filter((curve) => curve.x.length);
  const span = spanOf(Math.min(...ends.map((curve) => curve.x[0])), Math.max(...ends.map((curve) => curve.x.at(-1))));
  const layout = layoutOf(colour, title, span);
  layout.yaxis.type = log ? "log" : "linear";
  layout.uirevision = `${log} ${title}`;
  const thickLast = [...curves].sort((a, b) => a.line.width - b.line.width);
  Plotly.react(id, thickLast, layout, CONFIG);
}

function drawTimeline(unit, unitName, end, colour) {
  element("timeline").querySelector(".empty")?.remove();
  const byKind = new Map();
  for (const event of run.events) {
    if (!byKind.has(event.what)) byKind.set(event.what, []);
    byKind.get(event.what).push(event);
  }
  const traces = [...byKind].map(([what, events]) => {
    const [lane, tone, symbol] = MARKS[what] ?? OTHER_MARK;
    return {
      x: events.map((event) => event.seconds / unit), y: events.map(() => lane), type: "scatter", mode: "markers",
      marker: { symbol, size: what === "released" ? 9 : 11, color: colour(tone), line: { width: what === "released" ? 1 : 1.6, color: colour(tone) } },
      hovertext: events.map((event) => plain(`${clock(event.seconds)} ${[event.node, event.what].filter(Boolean).join(" ")}: ${event.text}`).replace(/(.{60,80}?) /g, "$1<br>")),
      hoverinfo: "text", name: plain(what), opacity: what === "released" ? 0.6 : 1, cliponaxis: false,
    };
  });
  const layout = layoutOf(colour, unitName, spanOf(run.events[0].seconds / unit, Math.max(end, 1) / unit));
  layout.margin = { l: 66, r: 22, t: 8, b: 34 };
  layout.yaxis = { ...layout.yaxis, type: "category", categoryorder: "array", categoryarray: LANES, range: [-0.6, LANES.length - 0.4], fixedrange: true, tickvals: LANES };
  Plotly.react("timeline", traces, layout, { ...CONFIG, displayModeBar: false });
}

function drawPipeline(pipeline, colour) {
  const { bars, stages, name } = pipeline, label = (stage) => `stage ${stage + 1}`;
  const traces = Object.entries(TASKS).map(([kind, tone]) => {
    const of = bars.filter((bar) => bar[1] === kind);
    return {
      type: "bar", orientation: "h", name: kind, y: of.map(([stage]) => label(stage)), base: of.map((bar) => bar[2]),
      x: of.map((bar) => bar[3] - bar[2]), hovertext: of.map((bar) => plain(bar[4])), hoverinfo: "text",
      marker: { color: colour(tone), line: { width: 0.5, color: colour("card") } },
    };
  });
  const first = Math.min(...bars.map((bar) => bar[2])), last = Math.max(...bars.map((bar) => bar[3]));
  const layout = layoutOf(colour, "seconds", [first, last + 0.01 * (last - first)]);
  layout.margin = { l: 66, r: 22, t: 8, b: 34 };
  layout.barmode = "overlay";
  layout.bargap = 0.25;
  layout.uirevision = name;
  const order = Array.from({ length: stages }, (_, stage) => label(stage));
  layout.yaxis = { ...layout.yaxis, type: "category", categoryorder: "array", categoryarray: order, range: [stages - 0.4, -0.6], fixedrange: true };
  Plotly.react("gantt", traces, layout, { ...CONFIG, displayModeBar: false });
}

// ---------------------------------------------------------------- theme

const THEMES = ["system", "light", "dark"];
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const wanted = localStorage.getItem("theme") ?? "system";
  document.documentElement.dataset.theme = wanted === "system" ? (prefersDark.matches ? "dark" : "light") : wanted;
  setText(element("theme"), `theme: ${wanted}`);
  draw();
}

element("theme").onclick = () => {
  const now = THEMES.indexOf(localStorage.getItem("theme") ?? "system");
  localStorage.setItem("theme", THEMES[(now + 1) % THEMES.length]);
  showTheme();
};
prefersDark.onchange = showTheme;
element("log").onchange = draw;
element("pipeline").onchange = draw;
element("routine").onchange = () => run.frame && showEvents();
element("plotly").addEventListener("load", draw);
document.addEventListener("visibilitychange", drawSoon);
showTheme();
listen();
