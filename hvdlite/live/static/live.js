// The page of a running job. It asks for the state, and shows it; all text goes through textContent.
"use strict";

const PHASES = ["backward", "waiting", "communicating", "between"];
const PATIENCE = 10; // attempts to connect again, one every two seconds
const byId = (id) => document.getElementById(id);
let shown = null; // the state that the page shows

// Numbers for people.

const scaled = (value, units, base) => {
  let unit = 0;
  while (Math.abs(value) >= base && unit < units.length - 1) {
    value /= base;
    unit += 1;
  }
  return `${number(value)} ${units[unit]}`.trim();
};
const number = (value) =>
  value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2 });
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"], 1000);
const memory = (value) => scaled(value, ["", "K", "M", "G", "T"], 1024);
const inMs = (seconds) => (1000 * seconds).toFixed(1);
const time = (seconds) => (seconds >= 1 ? `${number(seconds)} s` : `${number(1000 * seconds)} ms`);
const clock = (seconds) => {
  const [s, sign] = [Math.round(Math.abs(seconds)), seconds <= -0.5 ? "-" : ""];
  const two = (value) => String(value).padStart(2, "0");
  return `${sign}${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
};
const listed = (ranks) => `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")}`;
const value = (one) => (typeof one === "number" ? one.toLocaleString("en", { maximumSignificantDigits: 4 }) : String(one));

// Elements. What has not changed is left alone, so that a selection of text stays.

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function fill(parent, count, make) {
  while (parent.children.length > count) parent.lastChild.remove();
  while (parent.children.length < count) parent.append(make());
  return [...parent.children];
}

function element(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// The parts of the page.

function showHeadline(job) {
  const facts = job
    ? [
        ["steps", number(job.steps)],
        ["steps/s", number(job.rate)],
        ["time of a step", time(job.step)],
        ["samples/s", job.samples ? number(job.samples) : "not given"],
        ["bytes/s", bytes(job.bytes)],
        ["ranks", String(job.size)],
        ["epoch", String(job.epoch)],
        ["time", clock(job.age)],
        ...Object.entries(job.values).map(([name, last]) => [name, value(last)]),
      ]
    : [["ranks", "nothing is known yet"]];
  const make = () => element("div", "", element("dt"), element("dd"));
  fill(byId("headline"), facts.length, make).forEach((box, i) => {
    write(box.firstChild, facts[i][0]);
    write(box.lastChild, facts[i][1]);
  });
}

function showFindings(findings) {
  byId("findings-box").hidden = !findings.length;
  const make = () => element("li", "", element("p"), element("p"));
  fill(byId("findings"), findings.length, make).forEach((item, i) => {
    write(item.firstChild, findings[i].says);
    write(item.lastChild, findings[i].remedy);
  });
}

function showStalled(stalled) {
  byId("stalled-box").hidden = !stalled.length;
  fill(byId("stalled"), stalled.length, () => element("li")).forEach((item, i) => {
    const one = stalled[i];
    write(item, `${one.name}: ${listed(one.submitted)} for ${Math.round(one.seconds)} s; missing: ${listed(one.missing)}`);
  });
}

function showRanks(ranks) {
  const make = () => {
    const cells = Array.from({ length: 7 }, (_, i) => element("td", i ? "" : "text"));
    const head = element("th");
    head.scope = "row";
    return element("tr", "", head, ...cells);
  };
  const makeNote = () => {
    const cell = element("td");
    cell.colSpan = 8;
    return element("tr", "note", cell);
  };
  const body = byId("ranks");
  const rows = fill(body, 2 * ranks.length, () => (body.children.length % 2 ? makeNote() : make()));
  ranks.forEach((rank, i) => {
    const texts = [String(rank.rank), rank.host, ...PHASES.map((name) => inMs(rank[name]))];
    texts.push(rank.cpu === null ? "unknown" : `${Math.round(100 * rank.cpu)} %`);
    texts.push(rank.rss === null ? "unknown" : memory(rank.rss));
    texts.forEach((text, k) => write(rows[2 * i].children[k], text));
    rows[2 * i].children[1].title = rank.host;
    rows[2 * i + 1].hidden = !rank.note;
    write(rows[2 * i + 1].firstChild, rank.note);
  });
}

function showEvents(events) {
  byId("no-events").hidden = events.length > 0;
  byId("events-table").hidden = !events.length;
  const make = () => element("tr", "", element("td"), element("td", "text"), element("td"), element("td", "text"));
  fill(byId("events"), events.length, make).forEach((row, i) => {
    const one = events[i];
    const what = one.name && !one.text.includes(one.name) ? `${one.name}: ${one.text}` : one.text;
    [clock(one.time), one.kind, one.rank < 0 ? "" : String(one.rank), what].forEach((text, k) => write(row.children[k], text));
  });
}

function show(state) {
  shown = state;
  document.title = `${state.program} - hvdlite`;
  write(byId("program"), state.program);
  write(byId("span"), state.job ? `means of the last ${Math.round(state.job.seconds)} s` : "");
  showHeadline(state.job);
  showFindings(state.findings);
  showStalled(state.stalled);
  showRanks(state.ranks);
  showEvents(state.events);
  drawAll();
}

// Charts. Each draws itself anew from the state: there are at most some hundred points.

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function surface(id) {
  const canvas = byId(id);
  const [width, height, dots] = [canvas.clientWidth, canvas.clientHeight, window.devicePixelRatio || 1];
  canvas.width = Math.round(width * dots);
  canvas.height = Math.round(height * dots);
  const pen = canvas.getContext("2d");
  pen.scale(dots, dots);
  pen.font = "11px system-ui, sans-serif";
  return { canvas, pen, width, height, caption: canvas.parentNode.querySelector("output") };
}

// A round number at or above `most`, and so the top of the axis.
function roundUp(most) {
  const power = 10 ** Math.floor(Math.log10(most || 1));
  return power * [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * power >= most * 0.999);
}

function axes(chart, most, unit, times) {
  const { pen, width, height } = chart;
  const left = 58;
  const bottom = height - 18;
  const y = (one) => bottom - (one / most) * (bottom - 6);
  const [begin, end] = [times[0], times[times.length - 1]];
  const x = (at) => left + ((at - begin) / (end - begin || 1)) * (width - left - 4);
  pen.strokeStyle = color("line");
  pen.fillStyle = color("faint");
  pen.lineWidth = 1;
  for (const share of [0, 0.5, 1]) {
    const line = Math.round(y(share * most)) + 0.5;
    pen.beginPath();
    pen.moveTo(left, line);
    pen.lineTo(width, line);
    pen.stroke();
    pen.textAlign = "right";
    pen.fillText(share ? unit(share * most) : "0", left - 6, line + 4);
  }
  pen.textAlign = "left";
  pen.fillText(clock(begin), left, height - 3);
  pen.textAlign = "right";
  pen.fillText(clock(end), width - 2, height - 3);
  return { x, y };
}

// Pieces of a curve without gaps, as pairs of first and last index.
function pieces(values) {
  const found = [];
  values.forEach((one, i) => {
    if (one === null) return;
    if (i && values[i - 1] !== null) found[found.length - 1][1] = i;
    else found.push([i, i]);
  });
  return found;
}

// The layers of `curves`, each upon the one before; a single one is a line with a faint area.
function drawOver(id, times, layers, unit) {
  const chart = surface(id);
  const sums = times.map(() => 0);
  const stacked = layers.map(([name, values]) => {
    const below = [...sums];
    values.forEach((one, i) => (sums[i] += one || 0));
    return { name, values, below, above: [...sums] };
  });
  if (times.length < 2) return write(chart.caption, "after some seconds");
  const { x, y } = axes(chart, roundUp(Math.max(...sums)), unit, times);
  const { pen } = chart;
  for (const { name, values, below, above } of stacked) {
    for (const [first, last] of pieces(values)) {
      pen.beginPath();
      for (let i = first; i <= last; i += 1) pen.lineTo(x(times[i]), y(above[i]));
      if (layers.length === 1) {
        pen.strokeStyle = color(name);
        pen.lineWidth = 1.5;
        pen.stroke();
      }
      for (let i = last; i >= first; i -= 1) pen.lineTo(x(times[i]), y(below[i]));
      pen.globalAlpha = layers.length === 1 ? 0.15 : 0.9;
      pen.fillStyle = color(name);
      pen.fill();
      pen.globalAlpha = 1;
    }
  }
  let at = times.length - 1;
  if (chart.canvas.pointer !== undefined) {
    const distance = (i) => Math.abs(x(times[i]) - chart.canvas.pointer);
    at = times.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0);
    pen.fillStyle = color("ink");
    pen.fillRect(x(times[at]), 6, 1, chart.height - 24);
  }
  const none = layers[0][1][at] === null;
  write(chart.caption, `${none ? "no step" : unit(sums[at])} at ${clock(times[at])}`);
}

function drawBars(ranks) {
  byId("bars").style.height = `${Math.max(180, 24 + 12 * ranks.length)}px`;
  const chart = surface("bars");
  const sum = (rank) => PHASES.reduce((total, name) => total + rank[name], 0);
  const most = roundUp(Math.max(...ranks.map(sum), 1e-6));
  const { pen, width, height } = chart;
  const left = 58;
  const each = Math.min(60, (height - 22) / Math.max(1, ranks.length));
  const long = (seconds) => (seconds / most) * (width - left - 4);
  ranks.forEach((rank, i) => {
    let from = left;
    const y = 4 + i * each;
    pen.fillStyle = color("faint");
    pen.textAlign = "right";
    pen.fillText(`rank ${rank.rank}`, left - 6, y + each / 2 + 3);
    for (const name of PHASES) {
      pen.fillStyle = color(name);
      pen.fillRect(from, y, long(rank[name]), Math.max(2, each - 4));
      from += long(rank[name]);
    }
  });
  pen.fillStyle = color("faint");
  for (const share of [0, 0.5, 1]) {
    pen.textAlign = ["left", "center", "right"][2 * share];
    pen.fillText(share ? time(share * most) : "0", left + long(share * most), height - 3);
  }
}

function drawAll() {
  if (!shown) return;
  const { time: times, phases, samples, bytes: moved } = shown.curves;
  drawBars(shown.ranks);
  drawOver("step", times, PHASES.map((name) => [name, phases[name]]), time);
  drawOver("samples", times, [["accent", samples]], number);
  if (!samples.some((one) => one)) write(byId("samples").parentNode.querySelector("output"), "not given: hvd.observe(samples=...)");
  drawOver("bytes", times, [["accent", moved]], bytes);
}

// The connection.

function say(text, className) {
  write(byId("status"), text);
  byId("status").className = className;
}

function connect() {
  let attempts = 0;
  const source = new EventSource("/events");
  source.addEventListener("message", (message) => {
    attempts = 0;
    const state = JSON.parse(message.data);
    if (state.outcome !== null) source.close();
    say(state.outcome === null ? "live" : `the job has ended: ${state.outcome}`, state.outcome === null ? "" : "ended");
    show(state);
  });
  source.addEventListener("error", () => {
    attempts += 1;
    if (source.readyState === EventSource.CLOSED) {
      say("this browser is not let in: too many pages are open, or this page belongs to another job", "ended");
    } else if (attempts > PATIENCE) {
      source.close();
      say("the job does not answer any more; what you see is the last that it said", "ended");
    } else {
      say("the connection is lost; trying again", "lost");
    }
  });
}

for (const id of ["step", "samples", "bytes"]) {
  byId(id).addEventListener("pointermove", (event) => {
    event.target.pointer = event.offsetX;
    drawAll();
  });
  byId(id).addEventListener("pointerleave", (event) => {
    event.target.pointer = undefined;
    drawAll();
  });
}
window.addEventListener("resize", drawAll);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
connect();
