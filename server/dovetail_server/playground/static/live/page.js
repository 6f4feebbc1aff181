// Live: what the server does now, second by second, from its own metrics.
import { html, useEffect, useRef, useState } from "../core/html.js";
import { call, getJson } from "../core/api.js";
import { seconds } from "../core/reply.js";
import { Bars, Line } from "../parts/charts.js";
import { count, Page } from "../parts/page.js";
import { join, Timeline } from "./timeline.js";
import { histogram, parse, quantile, since, total } from "./exposition.js";

const EVERY_MS = 1000;
const SIZE = 120; // looks that are kept

const FIRST = "dovetail_time_to_first_token_seconds";
const GAP = "dovetail_inter_token_seconds";
const WHOLE = "dovetail_request_seconds";

/** One look at the metrics, and what went by since the one before. */
export function look(text, at, before) {
  const series = parse(text);
  const read = (name) => total(series, name);
  const counters = {
    step: read("dovetail_engine_step"),
    tokens: read("dovetail_generation_tokens_total"),
    prompt: read("dovetail_prompt_tokens_total"),
    cached: read("dovetail_cached_prompt_tokens_total"),
    requests: read("dovetail_requests_total"),
  };
  const passed = before ? (at - before.at) / 1000 : 0;
  const rate = (name) => {
    const [now, then] = [counters[name], before?.counters[name] ?? null];
    return now === null || then === null || now < then || !passed ? null : (now - then) / passed;
  };
  return {
    at,
    counters,
    running: read("dovetail_requests_running"),
    queued: read("dovetail_requests_queued"),
    throughput: read("dovetail_generation_tokens_per_second"),
    usage: read("dovetail_kv_usage_ratio"),
    steps: rate("step"),
    hits: counters.prompt ? counters.cached / counters.prompt : null,
    restarts: read("dovetail_engine_restarts_total"),
    finished: series.get("dovetail_choices_finished_total") ?? [],
    first: histogram(series, FIRST),
    gap: histogram(series, GAP),
    whole: histogram(series, WHOLE),
  };
}

export function LivePage() {
  const [looks, setLooks] = useState([]);
  const [problem, setProblem] = useState("");
  const [isPaused, setIsPaused] = useState(false);
  const [fromNow, setFromNow] = useState(null);
  const latest = useRef(null);
  const steps = useRef([]);
  useEffect(() => {
    if (isPaused) return undefined;
    const stopper = new AbortController();
    let timer = null;
    const go = async () => {
      try {
        const text = await (await call("metrics", { signal: stopper.signal })).text();
        const at = Date.now();
        latest.current = look(text, at, latest.current);
        const after = steps.current.at(-1)?.step ?? 0;
        const restarted = latest.current.counters.step !== null && latest.current.counters.step < after;
        const answer = await getJson(`v1/steps?after=${restarted ? 0 : after}`, stopper.signal);
        steps.current = join(steps.current, answer.steps, at);
        setLooks((all) => [...all.slice(1 - SIZE), latest.current]);
        setProblem("");
      } catch (error) {
        if (stopper.signal.aborted) return;
        setProblem(error.message);
      }
      if (!stopper.signal.aborted) timer = setTimeout(go, EVERY_MS);
    };
    go();
    return () => {
      stopper.abort();
      clearTimeout(timer);
    };
  }, [isPaused]);
  const now = looks.at(-1);
  const column = (name) => looks.map((one) => one[name]);
  return html`<${Page} title="Live" problem=${problem}>
    <div class="line">
      <button type="button" class="plain" aria-pressed=${isPaused} onClick=${() => setIsPaused(!isPaused)}>${isPaused ? "Resume" : "Pause"}</button>
      <button type="button" class="plain" aria-pressed=${fromNow !== null} onClick=${() => setFromNow(fromNow ? null : now)}>${fromNow ? "Histograms since the start" : "Histograms from now on"}</button>
      <span class="note">Once a second, from <code>/metrics</code>; the lines show two minutes.</span>
    </div>
    ${now && html`
      <section class="charts" aria-label="Now">
        <${Line} title="Running requests" values=${column("running")} size=${SIZE} show=${count} />
        <${Line} title="Queued requests" values=${column("queued")} size=${SIZE} show=${count} />
        <${Line} title="Tokens/s" values=${column("throughput")} size=${SIZE} show=${(value) => count(value.toFixed(1))} />
        <${Line} title="Steps/s" values=${column("steps")} size=${SIZE} show=${(value) => count(value.toFixed(1))} />
        <${Line} title="KV cache usage" values=${column("usage")} size=${SIZE} most=${1} show=${share} />
        <${Line} title="Prefix cache hit rate" values=${column("hits")} size=${SIZE} most=${1} show=${share} />
      </section>
      <${Timeline} rows=${steps.current} now=${now.at} />
      <section class="charts" aria-label="Histograms">
        <${Times} title="Time to first token" rows=${since(fromNow?.first ?? [], now.first)} />
        <${Times} title="Inter-token latency" rows=${since(fromNow?.gap ?? [], now.gap)} />
        <${Times} title="End-to-end latency" rows=${since(fromNow?.whole ?? [], now.whole)} />
      </section>
      <p class="note">Requests: ${count(now.counters.requests ?? 0)}, tokens: ${count(now.counters.tokens ?? 0)}, since startup.
        ${now.finished.filter(({ value }) => value).map(({ labels, value }) => ` ${labels.reason}: ${count(value)}.`)}
        ${now.restarts > 0 && ` Engine restarts: ${count(now.restarts)}.`}</p>
    `}
  <//>`;
}

function Times({ title, rows }) {
  const [half, most] = [quantile(rows, 0.5), quantile(rows, 0.99)];
  return html`<${Bars} title=${title} rows=${rows} show=${(bound) => seconds(bound * 1000)}>
    ${half !== null && html`<b>p50 ${seconds(half * 1000)}, p99 ${seconds(most * 1000)}</b>`}
  <//>`;
}

function share(value) {
  return `${(value * 100).toFixed(0)} %`;
}
