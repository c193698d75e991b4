// Draws the page of one node: /state says how it is, /rewards, /rollouts and /settings the rest.
// What a node or a stranger wrote is only ever set as text.
"use strict";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const POLL_MS = 1000;
const AGAIN_MS = 5000;
const LONGEST_MS = 20000;  // For an answer: the server cuts off who is slower than seconds.

let token = "";
let state = null;
let drawnRound = -1;
let rounds = [];
let shownRound = null;
let shown = [];

// ---- making elements ----

function make(name, text = "", classes = "") {
  const made = document.createElement(name);
  if (text !== "") made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

function draw(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}

function put(parent, ...children) {
  parent.replaceChildren(...children);
}

function facts(list, rows) {
  put(list, ...rows.filter(([, said]) => said !== "" && said !== null).flatMap(([name, said]) =>
    [make("dt", name), make("dd", said)]));
}

function row(cells) {
  const made = make("tr");
  for (const [text, classes] of cells) made.append(make("td", text, classes));
  return made;
}

const number = (value, digits = 3) => value === null || value === undefined ? "-" : value.toFixed(digits);
const whole = (value) => value === null || value === undefined ? "-" : value.toLocaleString("en");
const counted = (count, one, many) => `${whole(count)} ${count === 1 ? one : many}`;

function age(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
}

async function get(path) {
  const answer = await fetch(path, {headers: {Accept: "application/json"}, signal: AbortSignal.timeout(LONGEST_MS)});
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

// ---- state ----

function show(found) {
  state = found;
  const {status, verdicts, control} = found;
  document.title = `${status.name}: ${status.phase.name}`;
  $("name").textContent = status.name;
  const run = status.run ? `, run ${status.run}` : "";
  $("about").textContent = `${status.model}${run}, version ${status.progress.policy_version}, swarm ${status.swarm}`;
  showPhase();
  showControls(control, status);
  showCard("learning", verdicts.learning);
  showCard("helping", verdicts.helping);
  showCard("slow", verdicts.pace);
  showCard("sampler", verdicts.sampler);
  put($("why"), ...found.why.map((text) => make("li", text)));
  $("why").className = verdicts.learning.tone === "good" ? "" : "warn";
  showHelp(found);
  showPace(status);
  showPolicy(status, verdicts.sampler);
  showPipeline(status.pipeline);
  for (const id of ["learning", "rollouts", "sampler"]) $(id).hidden = !status.learns;
  $("foot").textContent = `swarmnode ${status.version}, peer ${status.peer_id}, process ${status.pid}. `
    + "Also here: /status, /metrics, /healthz.";
}

function showPhase() {
  if (!state) return;
  const {phase, progress, learns} = state.status;
  const limit = progress.rounds_limit === null ? "" : ` of ${progress.rounds_limit}`;
  const round = learns ? `round ${progress.round}${limit}; ` : "";
  const since = age(Date.now() / 1000 - phase.since);
  $("phase").textContent = `${round}${phase.name} for ${since}${phase.detail ? ` (${phase.detail})` : ""}`;
}

// A card is changed in its place: who stands on it with the keyboard stays there.
function showCard(target, verdict) {
  const card = $("cards").querySelector(`[href="#${target}"]`);
  card.className = `card ${verdict.tone}`;
  card.querySelector("strong").textContent = verdict.word;
  card.querySelector(".text").textContent = verdict.text;
}

const BUTTONS = {
  pause: ["Pause", "Pause when this round is done"],
  resume: ["Resume", "Continue the run"],
  finish: ["Finish round", "End when this round is done, with a checkpoint"],
  stop: ["Stop", "End now, with a checkpoint"],
};

function showControls(control, status) {
  const over = control.ending || status.phase.name === "stopped";
  const wanted = control.takes.filter((one) => one !== (control.paused ? "pause" : "resume"));
  const key = `${wanted} ${over}`;
  if ($("controls").dataset.shows !== key) {
    $("controls").dataset.shows = key;
    put($("controls"), ...wanted.map((request) => {
      const button = make("button", BUTTONS[request][0]);
      button.type = "button";
      button.title = BUTTONS[request][1];
      button.disabled = over;
      button.addEventListener("click", () => ask(request));
      return button;
    }));
  }
}

async function ask(request) {
  if (request === "stop" && !confirm("Stop this node? It writes a checkpoint first.")) return;
  let said = "the node does not answer";
  try {
    const answer = await fetch("control", {
      method: "POST",
      headers: {"Content-Type": "application/json", "X-Swarmnode-Token": token},
      body: JSON.stringify({request}),
      signal: AbortSignal.timeout(LONGEST_MS),
    });
    said = answer.ok ? (await answer.json()).answer : await answer.text();
  } catch (error) {
    if (error.name === "TimeoutError") said = "no answer yet; the node may have received it";
  }
  $("answer").textContent = `${BUTTONS[request][0]}: ${said}`;
  $("answer").hidden = false;
}

function showHelp(found) {
  const {network, library, training, exchange, help, receipts, health} = found.status;
  const book = training.book
    ? `${counted(training.book, "right answer", "right answers")}, ${training.book_foreign} from others; ${training.replayed} were replayed in this round`
    : "empty";
  const borrowed = library.answers
    ? `; learnt ${library.answers} answers from ${counted(library.lenders, "peer", "peers")}` : "";
  const tried = health.reached + health.out_of_reach;
  const nodesOf = (names) => names.map((one) => `${one.name} (${one.nodes})`).join(", ");
  facts($("shared"), [
    ["Swarm", health.nodes ? [
      `${counted(health.nodes, "other node", "other nodes")} heard`,
      tried ? `${health.reached} of ${tried} reachable` : "",
      health.headers_per_s === null ? "" : `${number(health.headers_per_s, 1)} headers/s`,
      health.tasks.length ? `on ${nodesOf(health.tasks)}` : "",
      health.versions.length ? `of version ${nodesOf(health.versions)}` : "",
    ].filter(Boolean).join(", ") : ""],
    ["Reach", [network.reach.text, ...network.reach.steps].join("; ")],
    ["Network", `${counted(network.peers, "peer", "peers")}, ${network.state} ${network.detail}`],
    ["Book", book],
    ["Library", `${counted(library.kept, "group", "groups")} kept for others${borrowed}`],
    ["Given", `${counted(exchange.published, "group", "groups")} announced, ${exchange.served} fetched by others, ${(exchange.bytes_out / 1e6).toFixed(2)} MB`],
    ["Got", `${exchange.headers} heard, ${exchange.fetched} fetched, ${exchange.accepted} accepted, ${(exchange.bytes_in / 1e6).toFixed(2)} MB`],
    ["This week", found.week],
    ["Thanked", receipts.nodes ? `${counted(receipts.nodes, "node", "nodes")} learnt from our groups, ${counted(receipts.groups, "time", "times")} in all` : ""],
    ["Not used", found.dropped],
    ["Help", help.asked || help.heard ? `asked others ${help.asked} times, was asked ${help.heard} times` : ""],
  ]);
  const body = $("peers").tBodies[0];
  if (found.peers.length) {
    put(body, ...found.peers.map((peer) => {
      const made = row([["", ""], [distance(peer.connected), ""], [whole(peer.gave), "number"],
        [peer.waits ? "waits: does not agree with ours yet" : peer.gave ? "yes" : "not yet", ""]]);
      made.cells[0].textContent = peer.name;
      made.cells[0].title = peer.peer;
      return made;
    }));
  } else {
    put(body, row([["Nobody is connected", ""], ["", ""], ["", ""], ["", ""]]));
  }
  const invites = $("invitation");
  put(invites);
  if (found.invitation.command) {
    invites.append(`${found.invitation.who} joins with `, make("code", found.invitation.command));
  }
}

const DISTANCES = {machine: "on this machine", lan: "in this network", public: "over the internet", relayed: "through a relay"};
const distance = (found) => found === null ? "no" : DISTANCES[found] || "yes";

function showPolicy(status, verdict) {
  const said = $("sampler-verdict");
  said.className = verdict.tone;
  said.textContent = `${verdict.word}: ${verdict.text}`;
  const {training, generation, checkpoint} = status;
  const share = (value) => value === null ? "" : `${(100 * value).toFixed(1)} %`;
  facts($("policy"), [
    ["Engine", `${generation.engine} ${generation.mode}`],
    ["Older tokens", share(training.off_policy_share)],
    ["Entropy", training.entropy === null ? "" : `${number(training.entropy)} nats`],
    ["Gradient norm", training.grad_norm === null ? "" : number(training.grad_norm)],
    ["Clipped", share(training.clipped_share)],
    ["Learning rate", training.learning_rate === null ? "" : training.learning_rate.toExponential(1)],
    ["Checkpoint", checkpoint.error || (checkpoint.round === null ? "none yet" : `round ${checkpoint.round}`)],
  ]);
}

function showPipeline(pipeline) {
  $("pipeline").hidden = !pipeline.name;
  if (!pipeline.name) return;
  const boxes = Array.from({length: Math.min(pipeline.stages || 0, 256)}, (_, stage) => {
    const ours = stage === pipeline.stage;
    const layers = ours ? `: layers ${pipeline.first_layer} to ${pipeline.end_layer - 1}` : "";
    return make("span", `Stage ${stage}${layers}`, ours ? "stage ours" : "stage");
  });
  put($("stages"), ...boxes);
  facts($("pipeline-facts"), [
    ["Name", pipeline.name],
    ["Members", `${pipeline.members}, ${whole(pipeline.replicas)} with our stage`],
    ["Iteration", `${pipeline.iteration}, ${number(pipeline.iteration_s, 2)} s, planned ${number(pipeline.planned_s, 2)} s`],
    ["Busy", pipeline.busy_share === null ? "" : `${(100 * pipeline.busy_share).toFixed(0)} %`],
    ["Lost", `${pipeline.lost} members; ${pipeline.repaired} micro-batches took another path, ${pipeline.given_up} found none`],
  ]);
}

// ---- the round as a timeline ----

function showPace(status) {
  const {speed, generation} = status;
  facts($("speed"), [
    ["Round", speed.round_s === null ? "none done yet" : `${number(speed.round_s, 2)} s: answers ${number(speed.generate_s, 2)} s, training ${number(speed.train_s, 2)} s`],
    ["Tokens", speed.tokens_per_s === null ? "" : `${whole(Math.round(speed.tokens_per_s))} a second, ${whole(status.progress.tokens)} in all`],
    ["Engine", `${generation.running} running, ${generation.waiting} waiting, ${generation.groups_in_flight} groups in progress`],
  ]);
  const phases = [...status.earlier, status.phase].filter((one) => one.name !== "starting");
  const begin = phases[0].since;
  const end = Math.max(Date.now() / 1000, status.phase.since);
  const names = [...new Set(phases.map((one) => one.name))];
  const picture = draw("svg", {viewBox: "0 0 1000 42", role: "img", preserveAspectRatio: "none", height: 42});
  picture.append(draw("title", {}, phases.map((one) => one.name).join(", then ")));
  phases.forEach((phase, place) => {
    const until = place + 1 < phases.length ? phases[place + 1].since : end;
    const x = 1000 * (phase.since - begin) / Math.max(end - begin, 1e-9);
    const width = 1000 * (until - phase.since) / Math.max(end - begin, 1e-9);
    const bar = draw("rect", {x, y: 4, width: Math.max(width, 1), height: 32, class: `p${names.indexOf(phase.name) % 6}`});
    bar.append(draw("title", {}, `${phase.name}: ${(until - phase.since).toFixed(2)} s`));
    picture.append(bar);
  });
  const seconds = (name) => phases.reduce((sum, one, place) =>
    one.name !== name ? sum : sum + (place + 1 < phases.length ? phases[place + 1].since : end) - one.since, 0);
  const legend = make("div", "", "legend");
  names.forEach((name, place) => {
    const box = draw("svg", {viewBox: "0 0 16 8"});
    box.append(draw("rect", {width: 16, height: 8, class: `p${place % 6}`}));
    const said = make("span");
    said.append(box, `${name} ${seconds(name).toFixed(2)} s`);
    legend.append(said);
  });
  put($("timeline"), picture, legend, make("figcaption", `The last ${age(end - begin)}, phase by phase`));
}

// ---- curves ----

function curve(series, {width, height, pad, caption}) {
  const points = series.flatMap((one) => one.y).filter((value) => value !== null);
  const xs = series.flatMap((one) => one.x);
  const low = Math.min(0, ...points), high = Math.max(1, ...points);
  const first = Math.min(...xs), last = Math.max(...xs, first + 1);
  const x = (value) => pad + (width - pad - 8) * (value - first) / (last - first);
  const y = (value) => height - 20 - (height - 30) * (value - low) / (high - low || 1);
  const picture = draw("svg", {viewBox: `0 0 ${width} ${height}`, role: "img"});
  picture.append(draw("title", {}, caption));
  for (const tick of [low, (low + high) / 2, high]) {
    picture.append(draw("line", {x1: pad, x2: width - 8, y1: y(tick), y2: y(tick), class: "grid"}));
    picture.append(draw("text", {x: pad - 5, y: y(tick) + 4, "text-anchor": "end"}, tick.toFixed(tick % 1 ? 1 : 0)));
  }
  picture.append(draw("text", {x: pad, y: height - 4}, String(first)));
  picture.append(draw("text", {x: width - 8, y: height - 4, "text-anchor": "end"}, `round ${xs.length ? Math.max(...xs) : first}`));
  for (const one of series) {
    let path = "", pen = "M";
    one.x.forEach((at, place) => {
      const value = one.y[place];
      if (value === null) return;
      path += `${pen}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
      if (one.dots) picture.append(draw("circle", {cx: x(at), cy: y(value), r: 4, class: one.name}));
    });
    if (path) picture.append(draw("path", {d: path, class: one.name}));
  }
  return picture;
}

function last(values) {
  return values.filter((value) => value !== null).at(-1) ?? null;
}

function showCurves(found) {
  const series = [
    {name: "external", x: found.rounds, y: found.external, told: "from others"},
    {name: "own", x: found.rounds, y: found.own, told: "own"},
    {name: "held", x: found.held_out_rounds, y: found.held_out, told: "held out", dots: true},
  ].filter((one) => one.y.some((value) => value !== null));
  if (!series.length) {
    put($("curve"), make("p", "No round is done yet.", "hint"));
    return;
  }
  put($("legend"), ...series.toReversed().map((one) => {
    const line = draw("svg", {viewBox: "0 0 26 10"});
    line.append(draw("path", {d: "M0 5H26", class: one.name}));
    if (one.dots) line.append(draw("circle", {cx: 13, cy: 5, r: 4, class: one.name}));
    const said = make("span");
    said.append(line, `${one.told} ${number(last(one.y), 2)}`);
    return said;
  }));
  const narrow = window.innerWidth < 640;
  const size = {width: narrow ? 420 : 1000, height: narrow ? 220 : 260, pad: 34};
  put($("curve"), curve(series, {...size, caption: "Reward by round"}));
  const names = [...new Set([...Object.keys(found.tasks), ...Object.keys(found.held_out_tasks)])].sort();
  put($("tasks"), ...names.map((name) => {
    const own = found.tasks[name] || [], held = found.held_out_tasks[name] || [];
    const figure = make("figure"), caption = make("figcaption");
    caption.append(make("b", name), make("span", `${number(last(own), 2)}, held out ${number(last(held), 2)}`));
    figure.append(caption, curve([
      {name: "own", x: found.rounds.slice(0, own.length), y: own},
      {name: "held", x: found.held_out_rounds.slice(0, held.length), y: held, dots: true},
    ], {width: 260, height: 120, pad: 26, caption: `Reward of ${name} by round`}));
    return figure;
  }));
}

// ---- rollouts ----

async function showRollouts(wanted) {
  const found = await get(wanted === null ? "rollouts" : `rollouts?round=${wanted}`);
  rounds = found.rounds;
  const slider = $("round");
  slider.max = Math.max(0, rounds.length - 1);
  slider.disabled = !rounds.length;
  if (found.round === null) {
    put($("own"), make("p", "None is kept yet.", "hint"));
    return;
  }
  slider.value = rounds.indexOf(found.round);
  slider.setAttribute("aria-valuetext", `round ${found.round}`);
  $("round-number").textContent = found.round;
  $("earlier").disabled = slider.value === "0";
  $("later").disabled = slider.value === slider.max;
  if (found.round === shownRound && found.rollouts.length === shown.length) return;
  shownRound = found.round;
  shown = found.rollouts;
  const tasks = [...new Set([...Array.from($("of-task").options, (one) => one.value), ...shown.map((one) => one.task)])].filter(Boolean).sort();
  if (tasks.length + 1 !== $("of-task").options.length) {
    const chosen = $("of-task").value;
    put($("of-task"), new Option("all", ""), ...tasks.map((name) => new Option(name, name)));
    $("of-task").value = chosen;
  }
  drawRollouts();
}

function drawRollouts() {
  const task = $("of-task").value;
  for (const [id, whose] of [["own", (one) => one.author === "own"], ["others", (one) => one.author !== "own"]]) {
    const wanted = shown.filter((one) => whose(one) && (!task || one.task === task));
    put($(id), ...(wanted.length ? wanted.map(rollout) : [make("p", "None in this round.", "hint")]));
  }
}

function rollout(one) {
  const made = make("article"), meta = make("div", "", "meta");
  const others = one.group_rewards || [];
  const told = [
    ["task", one.task], ["reward", number(one.reward, 2)],
    ["in a group of", others.length ? `${others.length}, mean ${number(mean(others), 2)}` : "-"],
    ["advantage", one.advantage === null ? "none: equal rewards" : number(one.advantage, 2)],
    ["policy version", String(one.policy_version)], ["ended by", one.finish],
    ...(one.author === "own" ? [] : [["of", one.author_name]]),
  ];
  for (const [name, said] of told) {
    const part = make("span", `${name} `);
    part.append(make("b", said));
    meta.append(part);
  }
  made.append(meta);
  const messages = one.messages || [["prompt", one.prompt]];
  for (const [role, text] of messages) made.append(turn(role, text));
  if (one.tokens && one.tokens.length) {
    made.append(...tokens(one));
  } else {
    made.append(turn("answer", one.completion, "said"));
  }
  if (one.turns) {
    const whole = make("details");
    whole.append(make("summary", `Turn by turn (${one.turns.length})`));
    for (const [said, observed] of one.turns) {
      whole.append(turn("policy", said, "said"), ...observed.map(([role, text]) => turn(role, text)));
    }
    made.append(whole);
  }
  return made;
}

const mean = (values) => {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};

function turn(role, text, classes = "") {
  const made = make("div", "", `turn ${classes}`);
  made.append(make("span", role, "role"), text);
  return made;
}

function tokens(one) {
  const box = turn("answer", "", "said"), says = make("div", "", "token-says");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Answer, token by token: arrow keys");
  says.setAttribute("aria-live", "polite");
  const spans = one.tokens.map((text, place) => {
    const made = make("span", text === "" ? "\u00b7" : text, "token");
    const version = versionOf(one, place), given = (one.given || []).some(([begin, end]) => begin <= place && place < end);
    if (version !== null) made.classList.add(`v${version % 6}`);
    if (given) made.classList.add("given");
    const logprob = one.logprobs && !given ? one.logprobs[place] : null;
    if (logprob !== null && logprob !== undefined) {
      made.style.backgroundColor = `rgba(var(--shade), ${(0.55 * (1 - Math.exp(logprob))).toFixed(3)})`;
    }
    const chance = given ? "the environment's" : logprob === null || logprob === undefined ? "probability not known" : `probability ${Math.exp(logprob).toFixed(3)}`;
    made.title = `${JSON.stringify(text)}: ${chance}${version === null ? "" : `, policy version ${version}`}`;
    return made;
  });
  let chosen = -1;
  const choose = (place) => {
    if (chosen >= 0) spans[chosen].classList.remove("chosen");
    chosen = Math.min(Math.max(place, 0), spans.length - 1);
    spans[chosen].classList.add("chosen");
    says.textContent = `Token ${chosen + 1} of ${one.tokens_in_all}: ${spans[chosen].title}`;
  };
  box.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (step) { choose(chosen + step); event.preventDefault(); }
  });
  box.addEventListener("click", (event) => {
    const place = spans.indexOf(event.target);
    if (place >= 0) choose(place);
  });
  box.append(...spans);
  if (one.tokens_in_all > spans.length) box.append(make("span", ` ... (${one.tokens_in_all - spans.length} more tokens)`, "hint"));
  return [box, says];
}

function versionOf(one, place) {
  const found = (one.spans || []).find(([, begin, end]) => begin <= place && place < end);
  return found ? found[0] : null;
}

// ---- settings ----

async function showSettings() {
  const found = await get("settings");
  const all = $("all-settings").checked;
  const wanted = found.filter((one) => all || one.origin !== "default");
  const rows = wanted.map((one) => row([[one.key, ""], [one.value, ""], [one.origin, ""], [one.meaning, ""]]));
  put($("settings-table").tBodies[0], ...(rows.length ? rows : [row([["All are defaults", ""], ["", ""], ["", ""], ["", ""]])]));
}

// ---- staying up to date ----

let reading = false;

async function readAgain() {
  if (reading || !state || state.newest_round === drawnRound && state.status.reward.eval_round === readAgain.evaluated) return;
  reading = true;
  try {
    drawnRound = state.newest_round;
    readAgain.evaluated = state.status.reward.eval_round;
    showCurves(await get("rewards"));
    // A rollout is not taken away from who reads it with the keyboard.
    if ($("live").checked && !document.activeElement.closest("article")) await showRollouts(null);
  } catch { drawnRound = -1; }
  reading = false;
}

function connection(is_there) {
  $("lost").hidden = is_there;
}

async function poll() {
  try {
    const found = await get("state");
    token = found.token;
    // What is drawn again loses what a reader has marked in it.
    if (JSON.stringify(found) !== JSON.stringify(state)) show(found);
    connection(true);
    return true;
  } catch {
    connection(false);
    return false;
  }
}

async function follow() {
  const isThere = await poll();
  readAgain();
  setTimeout(follow, isThere ? POLL_MS : AGAIN_MS);
}

function choose(place) {
  $("live").checked = false;
  if (rounds.length) showRollouts(rounds[Math.min(Math.max(place, 0), rounds.length - 1)]).catch(() => connection(false));
}

$("round").addEventListener("input", () => choose(Number($("round").value)));
$("earlier").addEventListener("click", () => choose(Number($("round").value) - 1));
$("later").addEventListener("click", () => choose(Number($("round").value) + 1));
$("live").addEventListener("change", () => $("live").checked && showRollouts(null).catch(() => connection(false)));
$("of-task").addEventListener("change", drawRollouts);
$("all-settings").addEventListener("change", () => showSettings().catch(() => connection(false)));
setInterval(showPhase, 1000);
follow();
showSettings().catch(() => connection(false));
