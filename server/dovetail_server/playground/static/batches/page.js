// Batches: a file of requests goes up, its progress is shown, and the replies come down.
import { html, useState } from "../core/html.js";
import { call, getJson } from "../core/api.js";
import { count, Page, useLoaded } from "../parts/page.js";
import { plain } from "../parts/text.js";

const EVERY_MS = 1500;
const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"];
const OPEN = new Set(["validating", "in_progress", "finalizing", "cancelling"]);

/** The endpoint that the first line of a file names, or null. */
export function endpointOf(text) {
  try {
    const { url } = JSON.parse(text.split("\n", 1)[0]);
    return ENDPOINTS.find((one) => one === url || one === `/v1${url}`) ?? null;
  } catch {
    return null;
  }
}

export function BatchesPage() {
  const batches = useLoaded(async (signal) => (await getJson("v1/batches?limit=50", signal)).data, EVERY_MS);
  const [problem, setProblem] = useState("");
  const attempt = async (work) => {
    setProblem("");
    try {
      await work();
      batches.again();
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<${Page} title="Batches" problem=${problem || batches.problem}
    lead="A file with one request per line, processed in the background while no other request needs the server.">
    <${Upload} attempt=${attempt} />
    ${batches.value?.length === 0 && html`<p class="note">No batches yet.</p>`}
    ${(batches.value ?? []).map((batch) => html`<${Batch} key=${batch.id} batch=${batch} attempt=${attempt} />`)}
  <//>`;
}

function Upload({ attempt }) {
  const [file, setFile] = useState(null);
  const [endpoint, setEndpoint] = useState(ENDPOINTS[0]);
  const [isBusy, setIsBusy] = useState(false);
  const choose = async (event) => {
    const chosen = event.target.files[0] ?? null;
    setFile(chosen);
    const named = chosen && endpointOf(await chosen.slice(0, 1 << 16).text());
    if (named) setEndpoint(named);
  };
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", file);
    setIsBusy(true);
    await attempt(async () => {
      const { id } = await (await call("v1/files", { method: "POST", form })).json();
      await call("v1/batches", { method: "POST", json: { input_file_id: id, endpoint, completion_window: "24h" } });
    });
    setIsBusy(false);
  };
  return html`<form class="card" aria-label="New batch" onSubmit=${submit}>
    <h2>New batch</h2>
    <label class="field">File (.jsonl) <input type="file" accept=".jsonl" onChange=${choose} /></label>
    <label class="field">Route
      <select value=${endpoint} onChange=${(event) => setEndpoint(event.target.value)}>${ENDPOINTS.map((one) => html`<option key=${one} value=${one} selected=${one === endpoint}>${one}</option>`)}</select>
    </label>
    <details class="section"><summary>What a line looks like</summary>
      <pre tabindex="0" role="region" aria-label="Example of a line"><code>${'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",\n "body": {"model": "…", "messages": [{"role": "user", "content": "Hello"}]}}'}</code></pre>
      <p class="note">All on one line.</p>
    </details>
    <p class="actions"><button type="submit" disabled=${!file || isBusy}>${isBusy ? "Uploading" : "Start"}</button></p>
  </form>`;
}

function Batch({ batch, attempt }) {
  const { total, completed, failed } = batch.request_counts;
  const cancel = () => attempt(() => call(`v1/batches/${batch.id}/cancel`, { method: "POST" }));
  const took = (batch.completed_at ?? batch.cancelled_at ?? batch.failed_at ?? batch.expired_at ?? Date.now() / 1000) - batch.created_at;
  return html`<section class="card batch" aria-label=${`Batch ${batch.id}`}>
    <div class="line"><h2><code>${batch.id}</code></h2><span class=${`state ${batch.status}`}>${batch.status.replace("_", " ")}</span></div>
    <progress max=${total || 1} value=${completed + failed} aria-label="Requests answered"></progress>
    <p>${count(completed)} of ${count(total)} answered${failed ? `, ${count(failed)} failed` : ""}, ${batch.endpoint}, ${Math.max(0, Math.round(took))} s,
      ${batch.usage ? ` ${count(batch.usage.output_tokens)} tokens` : ""}</p>
    ${(batch.errors?.data ?? []).slice(0, 10).map((error) => html`<p class="problem">${error.line ? `Line ${error.line}: ` : ""}${plain(error.message)}</p>`)}
    <p class="actions">
      ${OPEN.has(batch.status) && batch.status !== "cancelling" && html`<button type="button" class="plain" onClick=${cancel}>Cancel</button>`}
      ${batch.output_file_id && html`<button type="button" onClick=${() => attempt(() => download(batch.output_file_id, `${batch.id}.jsonl`))}>Replies</button>`}
      ${batch.error_file_id && html`<button type="button" class="plain" onClick=${() => attempt(() => download(batch.error_file_id, `${batch.id}-errors.jsonl`))}>Failed requests</button>`}
    </p>
  </section>`;
}

/** Save a file; it is fetched here, for a link could not carry the key. */
async function download(id, name) {
  const address = URL.createObjectURL(await (await call(`v1/files/${id}/content`)).blob());
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
