// The tabs, each made when it is first opened.
const TABS = { overview: "Overview", learning: "Learning", alignment: "Alignment", ledger: "Ledger", speed: "Speed",
  samples: "Samples", events: "Alerts and incidents", figures: "Figures", setup: "Setup" };

const byRun = (state, make) => state.runs.map((run, r) => el("div", {},
  state.runs.length > 1 ? el("h2", {}, run.name) : null, make(run, r)));

function tiles(state) {
  return byRun(state, (run) => el("div", { class: "tiles" }, run.figures.filter((f) => f[4]).map(([key, first, last, best]) =>
    el("div", { class: "tile" }, el("b", {}, number(last)), el("span", {}, key), el("br"),
      el("span", {}, `first ${number(first)}${best === null ? "" : `, best ${number(best)}`}`)))));
}

function attention(state) {
  return byRun(state, (run) => [
    ...run.alerts.slice(0, 5).map((a) => el("p", { class: "card alert" }, alertText(a))),
    ...run.warnings.map((text) => el("p", { class: "card alert" }, text)),
    run.ledger && run.ledger.wrong && el("p", { class: "card alert" }, run.ledger.wrong)]);
}

const alertText = (a) => `step ${a.step}: ${a.alert}: ${figure(a.value)}, threshold ${figure(a.threshold)}; ${a.action}${a.over ? `; over at step ${a.over}` : ""}`;
const figure = (value) => (typeof value === "number" ? number(value) : String(value));

function worst(state) {
  const rows = state.samples().flatMap((of, run) => of.worst.map((w) => ({ ...w, run, s: of.samples[w.sample] })));
  if (!rows.length) return el("p", { class: "card" }, "No samples are kept in rollouts/, or none of them is bad by any of these causes.");
  const cells = rows.map((w) => [w.cause, w.unit ? `${number(w.figure)} ${w.unit}` : "", state.runs.length > 1 ? state.runs[w.run].name : "",
    w.s.step, w.s.reward === null ? "none" : w.s.reward, w.s.prompt.slice(0, 80), w.s.response.slice(0, 120)]);
  return table(["cause", "figure", state.runs.length > 1 ? "run" : "", "step", "reward", "prompt", "response"], cells,
    (at) => ({ class: "go", onclick: () => { Object.assign(state.view, CLEAR, { open: keyOf(rows[at].run, rows[at].s) }); state.open("samples"); } }));
}

function ledgerTable(run) {
  const of = run.ledger;
  if (!of) return el("p", { class: "card" }, "No ledger.jsonl: a run without a rollout has none.");
  const out = [of.wrong ? el("p", { class: "bad" }, `${of.wrong}. Nothing after it is counted here.`)
    : of.totals && el("p", { class: "good" }, "Every sample issued was trained once, discarded once, or is in flight.")];
  if (of.unfinished) out.push(el("p", {}, `${of.unfinished} lines after the last complete step are of an unfinished step.`));
  if (of.totals) {
    const share = (n) => `${((100 * n) / Math.max(of.totals.issued, 1)).toFixed(1)}%`;
    const rows = [["issued", of.totals.issued], ["trained", of.totals.trained], ["in flight", of.totals.in_flight],
      ...of.reasons.map(([reason, n]) => [`discarded: ${reason}`, n])];
    out.push(table([`until step ${of.totals.step}`, "samples", "share"], rows.map(([name, n]) => [name, n, share(n)])));
  }
  return out;
}

function figuresTab(state) {
  const holder = el("div", {}), search = el("input", { type: "search", placeholder: "search metrics", oninput: () => fill() });
  function fill() {
    const part = search.value.toLowerCase(), keys = new Map();
    state.runs.forEach((run, r) => run.figures.forEach(([key, first, last, best, main]) => {
      if (!key.toLowerCase().includes(part)) return;
      if (!keys.has(key)) keys.set(key, { main, of: [] });
      keys.get(key).of[r] = [first, last, best];
    }));
    const names = state.runs.flatMap((run) => ["first", "last", "best"].map((n) => (state.runs.length > 1 ? `${run.name}: ${n}` : n)));
    const rows = [...keys];
    holder.replaceChildren(table(["metric", ...names], rows.map(([key, { of }]) =>
      [el("code", {}, key), ...state.runs.flatMap((_, r) => of[r] || [null, null, null])]), (at) => ({ class: rows[at][1].main ? "main" : "" })));
  }
  fill();
  return { element: el("div", {}, el("div", { class: "filters" }, search, el("span", { class: "sub" }, "docs/metrics.md defines each metric")), holder), again: fill };
}

function eventsTab(state) {
  return byRun(state, (run) => [
    el("h2", {}, "Alerts"),
    run.alerts.length ? table(["step", "over at", "alert", "value", "threshold", "action"],
      run.alerts.map((a) => [a.step, a.over ?? "", a.alert, a.value, a.threshold, a.action]))
      : el("p", { class: "card" }, "No alert has fired by the rules of [alerts] in the configuration."),
    el("h2", {}, "Incidents"),
    run.incidents.length ? run.incidents.map((one, i) => el("details", { open: i === 0 }, el("summary", {}, one.name), el("pre", {}, one.text)))
      : el("p", { class: "card" }, "No incidents: the run did not stop or go back by itself."),
    el("h2", {}, "Warnings"),
    run.warnings.length ? run.warnings.map((text) => el("p", { class: "card alert" }, text)) : el("p", { class: "card" }, "None.")]);
}

function setupTab(state) {
  return byRun(state, (run) => [el("h2", {}, "Started"),
    run.starts.length ? table(["when", "host", "command", "commit", "versions"], run.starts) : el("p", { class: "card" }, "No starts.jsonl."),
    el("h2", {}, "Configuration"), el("pre", { class: "card" }, run.config || "No config.toml.")]);
}

const CLEAR = { text: "", run: "", step: "", finish: "", low: "", high: "", sort: "order" };

function makeTab(name, state) {
  if (name === "samples") return samplesTab(state);
  if (name === "figures") return figuresTab(state);
  const still = (make) => { const element = el("div", {}), again = () => element.replaceChildren(...make(state)); again(); return { element, again }; };
  if (name === "events") return still(eventsTab);
  if (name === "setup") return still(setupTab);
  const drawn = panels(state.tabs[name], state);
  if (name === "overview") {
    const above = still((s) => [...attention(s), ...tiles(s)]), below = still((s) => [el("h2", {}, "Worst samples by cause"), worst(s)]);
    return { element: el("div", {}, above.element, drawn.element, below.element), again() { above.again(); drawn.again(); below.again(); } };
  }
  if (name === "ledger") {
    const below = still((s) => byRun(s, (run) => [el("h2", {}, "Samples"), ledgerTable(run)]));
    return { element: el("div", {}, drawn.element, below.element), again() { drawn.again(); below.again(); } };
  }
  return drawn;
}

function heading(state) {
  byId("title").textContent = state.runs.map((run) => run.name).join(" · ");
  byId("state").textContent = state.runs.map((run) => {
    const step = run.last.step, wall = run.last.wall_s, tokens = run.last.tokens_total;
    return [`step ${number(step)}${run.steps ? ` of ${number(run.steps)}` : ""}`, wall !== undefined && duration(wall),
      tokens !== undefined && `${number(tokens)} response tokens`].filter(Boolean).join(" · ");
  }).join(" | ");
}

function start() {
  const data = parsed("data"), made = {};
  let samples = null, current = null;
  const state = { runs: data.runs, tabs: data.tabs, live: data.live, view: { ...CLEAR, open: null, colour: "gap" },
    samples() { samples = samples || parsed("samples"); return samples; },
    renewSamples(of) { samples = of; delete made.samples; if (current === "samples") state.open("samples"); else state.again(); },
    again() { heading(state); if (made[current]) made[current].again(); },
    open(name) {
      if (name === "samples" && current !== "samples") delete made.samples;
      current = name;
      const again = name in made;
      if (!again) made[name] = makeTab(name, state);
      byId("main").replaceChildren(made[name].element);
      if (again) made[name].again();
      for (const tab of byId("tabs").children) tab.setAttribute("aria-selected", String(tab.id === `tab-${name}`));
    } };
  byId("tabs").append(...Object.entries(TABS).map(([name, title]) => el("button",
    { type: "button", role: "tab", id: `tab-${name}`, onclick: () => state.open(name) }, title)));
  heading(state);
  state.open("overview");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.again());
  if (state.live) follow(state);
  performance.mark("made");
}

start(); // plotly, the last script of the file, comes after it
