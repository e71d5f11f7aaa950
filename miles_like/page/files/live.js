// A served page asks for the rows after its last one, and for the whole data where the run has gone back.
const KEPT_POINTS = 3000;

async function asked(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(`${path}: status ${reply.status}`);
  return reply.json();
}

function append(run, rows) {
  for (const row of rows) {
    for (const [key, value] of Object.entries(row)) {
      if (key === "step") continue;
      const curve = (run.curves[key] = run.curves[key] || [[], []]);
      curve[0].push(row.step);
      curve[1].push(value);
      const means = run.means[key];
      if (means) means.values.push((means.values.at(-1) ?? value) + (value - (means.values.at(-1) ?? value)) / means.window);
    }
    run.last = row;
  }
}

function follow(state) {
  const run = state.runs[0];
  let { samples, generation, events } = state.live;
  async function poll() {
    try {
      const found = await asked(`rows?after=${run.last.step}&generation=${generation}&events=${events}`);
      const long = Object.values(run.curves).some((curve) => curve[0].length > KEPT_POINTS);
      if (found.renew || long) {
        const whole = await asked("data");
        Object.assign(run, whole.run);
        generation = whole.generation;
        state.again();
      } else if (found.parts) {
        append(run, found.rows);
        Object.assign(run, found.parts);
        state.again();
      }
      events = found.events;
      if (found.samples !== samples) {
        samples = found.samples;
        state.renewSamples(await asked("samples"));
      }
      byId("state").classList.remove("bad");
      document.body.dataset.polled = String(Number(document.body.dataset.polled || 0) + 1);
    } catch (error) {
      byId("state").textContent = `not renewed: ${error.message}`;
      byId("state").classList.add("bad");
    }
    setTimeout(poll, 1000 * state.live.poll_s);
  }
  setTimeout(poll, 1000 * state.live.poll_s);
}
