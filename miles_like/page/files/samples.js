// The samples: search, filters, and the tokens of one, coloured by a value.
const LISTED = 200;
const COLOURINGS = {
  gap: { name: "log-prob gap", unit: "nats, trainer less rollout", signed: true, limit: 1,
    missing: "the rollout has no trainer's log-probs here: set train.token_logprobs_every" },
  advantage: { name: "advantage", unit: "", signed: true, limit: 2, missing: "samples that rollout workers hold have no advantages" },
  age: { name: "staleness", unit: "versions", signed: false, limit: 4, missing: "the samples of this run have no weight versions" },
  logprobs: { name: "log-prob of the rollout", unit: "nats", signed: false, limit: -6,
    missing: "the samples of this run have no log-probs" },
};

const keyOf = (run, sample) => [run, sample.step, sample.id, sample.index].join("\n");

function allSamples(state) {
  return state.samples().flatMap((of, run) => of.samples.map((sample) => ({ run, sample,
    text: `${sample.id} ${sample.prompt} ${sample.response} ${sample.answer}`.toLowerCase() })));
}

function found(all, filter) {
  const words = filter.text.toLowerCase().split(/\s+/).filter(Boolean);
  return all.filter(({ run, sample, text }) => words.every((w) => text.includes(w)) &&
    (filter.run === "" || run === Number(filter.run)) && (filter.step === "" || sample.step === Number(filter.step)) &&
    (filter.finish === "" || sample.finish === filter.finish) &&
    (filter.low === "" || (sample.reward !== null && sample.reward >= Number(filter.low))) &&
    (filter.high === "" || (sample.reward !== null && sample.reward <= Number(filter.high))));
}

const SORTS = {
  order: ["in order", () => 0],
  worst: ["lowest reward first", (a, b) => (a.sample.reward ?? -Infinity) - (b.sample.reward ?? -Infinity)],
  best: ["highest reward first", (a, b) => (b.sample.reward ?? -Infinity) - (a.sample.reward ?? -Infinity)],
  long: ["longest first", (a, b) => (b.sample.tokens || 0) - (a.sample.tokens || 0)],
};

function choice(label, options, onchange, value) {
  return el("label", {}, `${label} `, el("select", { "aria-label": label, onchange: (e) => onchange(e.target.value) },
    options.map(([v, name]) => el("option", { value: String(v), selected: String(v) === String(value) }, name))));
}

const rewardOf = (sample) => el("span", { class: sample.reward > 0 ? "good" : "bad" },
  sample.reward === null ? "no score" : `reward ${number(sample.reward)}`);

function samplesTab(state) {
  const all = allSamples(state), view = state.view;
  if (!all.length) return { element: el("p", { class: "card" },
    "No samples: a run with a rollout writes rollouts/step_N.jsonl; supervised training samples nothing."), again() {} };
  const list = el("div", { class: "list", id: "list" }), detail = el("div", { id: "detail" }), count = el("p", { class: "sub", id: "count" });
  const left = state.samples().reduce((n, of) => n + of.left_out, 0);
  const show = (one) => { view.open = keyOf(one.run, one.sample); detail.replaceChildren(sampleView(one, state)); refresh(); };
  function refresh() {
    const kept = found(all, view).sort(SORTS[view.sort][1]);
    count.textContent = `${counted(kept.length, "sample")} of ${number(all.length)}` +
      (left ? `; ${number(left)} more of these steps are in rollouts/` : "");
    list.replaceChildren(...kept.slice(0, LISTED).map((one) => el("button",
      { type: "button", "aria-current": String(view.open === keyOf(one.run, one.sample)), onclick: () => show(one) },
      el("span", { class: "text" }, one.sample.prompt), el("span", { class: "text sub" }, one.sample.response || "(empty)"),
      el("span", { class: "sub" }, `step ${one.sample.step} · ${counted(one.sample.tokens ?? 0, "token")} · ${one.sample.finish} · `), rewardOf(one.sample))),
    kept.length > LISTED ? el("p", { class: "sub" }, `${number(kept.length - LISTED)} more: narrow the search`) : "");
    return kept;
  }
  const set = (key) => (value) => { view[key] = value; refresh(); };
  const distinct = (of) => [...new Set(all.map(of))].sort((a, b) => (a > b ? 1 : -1)).map((v) => [v, String(v)]);
  const bound = (key, label) => el("label", {}, `${label} `, el("input", { type: "number", step: "any", "aria-label": label, value: view[key],
    oninput: (e) => set(key)(e.target.value) }));
  const filters = el("div", { class: "filters" },
    el("input", { type: "search", id: "search", placeholder: "search prompts, responses, answers", value: view.text,
      oninput: (e) => set("text")(e.target.value) }),
    state.runs.length > 1 && choice("run", [["", "all"], ...state.runs.map((r, i) => [i, r.name])], set("run"), view.run),
    choice("step", [["", "all"], ...distinct((one) => one.sample.step)], set("step"), view.step),
    choice("end", [["", "all"], ...distinct((one) => one.sample.finish)], set("finish"), view.finish),
    bound("low", "reward from"), bound("high", "to"),
    choice("sorted", Object.entries(SORTS).map(([k, v]) => [k, v[0]]), set("sort"), view.sort));
  const kept = refresh(), open = all.find((one) => view.open === keyOf(one.run, one.sample));
  if (open || kept[0]) show(open || kept[0]);
  return { element: el("div", {}, filters, count, el("div", { class: "split" }, list, detail)), again() {} };
}

function sampleView({ run, sample }, state) {
  const parts = Object.entries(sample.parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const tokens = el("div", {}), has = (key) => sample.turns.some((turn) => turn[key]);
  const first = has(state.view.colour) ? state.view.colour : Object.keys(COLOURINGS).find(has) || "logprobs";
  const colour = (key) => tokens.replaceChildren(...tokenView(sample, key));
  colour(first);
  return el("article", { class: "card" },
    el("p", { class: "sub" }, state.runs.length > 1 ? `${state.runs[run].name} · ` : "",
      `step ${sample.step} · ${sample.id}/${sample.index}${sample.row ? `.${sample.row}` : ""} · ${counted(sample.tokens ?? 0, "token")} · end: ${sample.finish} · `, rewardOf(sample)),
    parts && el("p", { class: "sub" }, `parts: ${parts}`),
    el("h2", {}, "Prompt"), el("pre", { id: "prompt" }, sample.prompt),
    el("h2", {}, "Response"), el("pre", { id: "response" }, sample.response),
    sample.answer && el("h2", {}, "Answer"), sample.answer && el("pre", {}, sample.answer),
    el("h2", {}, "Tokens"),
    sample.turns.length ? choice("coloured by", Object.entries(COLOURINGS).map(([k, c]) => [k, c.name]), (key) => { state.view.colour = key; colour(key); }, first)
      : el("p", { class: "sub" }, "This sample has no values of its tokens, or the page's room for them is used up."),
    tokens);
}

// Stretches of tokens: the policy's open where there is one, those of the prompt and of an environment folded.
function tokenView(sample, key) {
  const kind = COLOURINGS[key], own = sample.turns.filter((turn) => turn.own);
  const values = own.flatMap((turn) => turn[key] || []);
  const limit = Math.max(Math.abs(kind.limit) / 10, Math.min(Math.abs(kind.limit), Math.max(0, ...values.map(Math.abs))));
  const head = el("span", { class: "scale" }, values.length ? `${kind.unit && `${kind.unit}; `}full colour at ${number(limit)}` : kind.missing);
  let turns = 0;
  return [head, ...sample.turns.map((turn, i) => {
    const name = turn.own ? `turn ${++turns} of ${own.length}` : i ? "environment" : "prompt";
    const shown = turn.ids.map((id, at) => {
      const value = turn.own ? (turn[key] || [])[at] : undefined, text = turn.words ? turn.words[at] : String(id);
      const title = [`token ${id}`, ...(turn.own ? Object.entries(COLOURINGS).filter(([k]) => turn[k] && turn[k][at] !== undefined)
        .map(([k, c]) => `${c.name} ${number(turn[k][at])}`) : [])].join("\n");
      const made = el("span", { title, class: turn.words ? "" : "id" }, text);
      if (value !== undefined) made.style.background = shade(value / limit, kind.signed);
      return made;
    });
    const more = turn.more ? el("p", { class: "sub" }, `${number(turn.more)} more tokens`) : null;
    return el("details", { open: turn.own && own.length === 1 }, el("summary", {}, `${name}: ${counted(turn.ids.length, "token")}${turn.note ? `; ${turn.note}` : ""}`),
      el("div", { class: "tokens" }, shown), more);
  })];
}

function shade(share, signed) {
  const strength = Math.min(1, Math.abs(share)) * 0.75;
  return share < 0 && signed ? `rgba(0,114,178,${strength})` : `rgba(213,94,0,${strength})`;
}
