// Panels are drawn when they come into view. plotly reads a few tags in the texts that it draws: plain() leaves none.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F"];
const PHASES = { rollout: "#0072B2", experience: "#CC79A7", train: "#E69F00", publish: "#009E73", checks: "#56B4E9" };
const plain = (text) => String(text).slice(0, 60).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const EVAL_NOT = ["/unscored_frac", "/loss", "/margin", "/regression", "/best_tokens"];

function matches(pattern, key) {
  const at = pattern.indexOf("*");
  if (at < 0) return pattern === key;
  const head = pattern.slice(0, at), tail = pattern.slice(at + 1);
  return key.length > head.length + tail.length && key.startsWith(head) && key.endsWith(tail);
}

// [metric, its name] of a panel that any of the runs has
function measured(panel, runs) {
  const found = new Map();
  for (const [pattern, name] of panel.metrics) {
    for (const run of runs) for (const key of Object.keys(run.curves)) {
      if (matches(pattern, key) && !found.has(key)) found.set(key, name || key.slice(pattern.indexOf("*")));
    }
  }
  return [...found];
}

function lines(panel, runs) {
  const keys = measured(panel, runs), traces = [];
  keys.forEach(([key, name], k) => runs.forEach((run, r) => {
    if (!(key in run.curves)) return;
    let [x, y] = run.curves[key];
    const colour = COLOURS[(runs.length > 1 ? r : k) % COLOURS.length];
    const dash = runs.length > 1 && k ? ["solid", "dot", "dash", "dashdot"][k % 4] : "solid";
    const label = plain(runs.length > 1 ? (keys.length > 1 ? `${run.name}: ${name}` : run.name) : name);
    if (panel.log) { const kept = y.map((v) => v > 0); x = x.filter((_, i) => kept[i]); y = y.filter((_, i) => kept[i]); }
    const hover = `%{y:.5~g} at step %{x}<extra>${label.replace(/[%{}]/g, " ")}</extra>`;
    if (panel.kind === "bars") {
      traces.push({ type: "bar", x, y, name: label, marker: { color: colour, line: { width: 0 } }, hovertemplate: hover });
      return;
    }
    const means = run.means[key], noisy = keys.length === 1 && means && means.window > 1 && !panel.log;
    if (noisy) traces.push({ type: "scatter", mode: "lines", x, y, line: { color: colour, width: 0.8 }, opacity: 0.35,
      hovertemplate: hover, showlegend: false });
    traces.push({ type: "scatter", mode: x.length < 3 ? "markers" : "lines", x, y: noisy ? means.values : y,
      name: label, line: { color: colour, width: 1.8, dash }, marker: { color: colour }, hovertemplate: hover });
  }));
  return traces;
}

function evaluations(panel, runs) {
  const traces = [], keys = measured(panel, runs).filter(([key]) => !EVAL_NOT.some((end) => key.endsWith(end)) &&
    !key.includes("/reward/") && !key.includes("/beam_tokens"));
  keys.forEach(([key, name], k) => runs.forEach((run, r) => {
    if (!(key in run.curves)) return;
    const [x, y] = run.curves[key], errors = run.errors[key] || {};
    const colour = COLOURS[(runs.length > 1 ? r + k * runs.length : k) % COLOURS.length];
    const label = plain(runs.length > 1 ? `${run.name}: ${name}` : name);
    const bars = x.map((step) => errors[step] || 0);
    traces.push({ type: "scatter", mode: "lines+markers", x, y, name: label, line: { color: colour, width: 2 },
      error_y: { type: "data", array: bars, visible: bars.some(Boolean), thickness: 1.2, width: 3, color: colour },
      hovertemplate: `%{y:.4f} at step %{x}<extra>${label.replace(/[%{}]/g, " ")}</extra>` });
  }));
  return traces;
}

function grid(panel, runs) {
  const run = runs.find((one) => one.layers);
  if (!run) return [];
  return [{ type: "heatmap", x: run.layers.x, y: run.layers.y.map(plain), z: run.layers.z, colorscale: "Viridis",
    colorbar: { thickness: 10 }, hovertemplate: "layer %{y}, step %{x}: %{z:.4f}<extra></extra>" }];
}

function histogram(panel, runs, state) {
  const traces = [];
  runs.forEach((run, r) => {
    const found = state.samples()[r].rewards;
    if (!found) return;
    Object.entries(found.counts).forEach(([step, counts], i) => traces.push({ type: "bar", x: found.centres, y: counts,
      name: plain(runs.length > 1 ? `${run.name}: step ${step}` : `step ${step}`), opacity: i || r ? 1 : 0.6,
      marker: { color: COLOURS[(2 * r + i) % COLOURS.length] }, hovertemplate: "reward %{x}: %{y} samples<extra></extra>" }));
  });
  return traces;
}

function ratios(panel, runs, state) {
  return runs.flatMap((run, r) => {
    const found = state.samples()[r].ratios;
    if (!found) return [];
    return [{ type: "bar", x: found.bins, y: found.counts, name: plain(`${run.name}: step ${found.step}`),
      marker: { color: COLOURS[r % COLOURS.length] }, hovertemplate: "rho %{x}: %{y} tokens<extra></extra>" }];
  });
}

function timeline(panel, runs) {
  const bars = runs.flatMap((run) => {
    const first = runs.length > 1 ? Math.min(...run.gantt.map((b) => b.start)) : 0;
    return run.gantt.map((b) => ({ ...b, start: b.start - first,
      row: plain(runs.length > 1 ? `${run.name}: step ${b.step}` : `step ${b.step}`) }));
  });
  return [...new Set(bars.map((b) => b.phase))].map((phase) => {
    const of = bars.filter((b) => b.phase === phase);
    return { type: "bar", orientation: "h", y: of.map((b) => b.row), base: of.map((b) => b.start),
      x: of.map((b) => b.seconds), name: phase, marker: { color: PHASES[phase] || "#9A9A9A" },
      hovertemplate: `%{x:.3f} s<extra>${phase}</extra>` };
  });
}

const KINDS = { lines, bars: lines, evals: evaluations, grid, histogram, ratios, gantt: timeline };

function drawing(panel, traces) {
  const ink = variable("--ink"), line = variable("--line");
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const steps = !["histogram", "ratios", "gantt"].includes(panel.kind);
  return { margin: { l: 48, r: 12, t: 8, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 11 }, hovermode: "closest", barmode: panel.kind === "bars" ? "relative" : panel.kind === "gantt" ? "overlay" : "group",
    bargap: panel.kind === "bars" ? 0 : 0.2, showlegend: traces.filter((t) => t.showlegend !== false).length > 1 && panel.kind !== "grid",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 10 } },
    xaxis: { ...axis, ...(steps ? {} : { type: panel.kind === "gantt" ? "linear" : "category" }) },
    yaxis: { ...axis, type: panel.log || panel.kind === "ratios" ? "log" : panel.kind === "gantt" || panel.kind === "grid" ? "category" : "linear",
      tickformat: panel.share ? ",.4~%" : "", autorange: panel.kind === "gantt" ? "reversed" : true } };
}

function draw(panel, holder, state) {
  const runs = state.runs, traces = KINDS[panel.kind](panel, runs, state);
  if (!traces.length) {
    if (holder.classList.contains("plot")) window.Plotly.purge(holder);
    holder.className = "missing";
    holder.replaceChildren(`No data: ${panel.missing}.`);
    return;
  }
  if (holder.className === "missing") holder.replaceChildren();
  holder.className = "plot";
  window.Plotly.react(holder, traces, drawing(panel, traces), { displaylogo: false, responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
}

// The panels of a tab; returns them, and what draws those that have been in view again.
function panels(list, state) {
  const seen = new Map();
  const cards = list.map((panel) => {
    const holder = el("div", { class: "plot" });
    const card = el("section", { class: panel.kind === "gantt" || panel.kind === "grid" ? "panel wide" : "panel",
      id: `panel-${panel.id}` }, el("h3", {}, panel.title), el("p", { class: "sub" }, panel.unit), holder);
    seen.set(card, { panel, holder, drawn: false });
    return card;
  });
  const show = (card) => draw(seen.get(card).panel, seen.get(card).holder, state);
  const waiting = [];  // one plot at a time: the page answers in between
  const next = () => {
    if (!window.Plotly) { document.addEventListener("DOMContentLoaded", next, { once: true }); return; }
    const card = waiting.shift();
    if (card.isConnected) {  // else its tab was left: it is seen again when the tab is opened
      seen.get(card).drawn = true;
      show(card);
    }
    if (waiting.length) setTimeout(next);
  };
  const watcher = new IntersectionObserver((entries) => {
    const idle = !waiting.length;
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting && !seen.get(target).drawn && !waiting.includes(target)) waiting.push(target);
    }
    if (idle && waiting.length) setTimeout(next);
  }, { rootMargin: "100px" });
  cards.forEach((card) => watcher.observe(card));
  return { element: el("div", { class: "panels" }, cards),
    again: () => seen.forEach((one, card) => { if (one.drawn) show(card); }) };
}
