// Model: what the server knows of its model, of its memory and of the plugins that are installed.
import { html, useState } from "../core/html.js";
import { getJson } from "../core/api.js";
import { bytes, count, Facts, Page, useLoaded } from "../parts/page.js";
import { plain } from "../parts/text.js";

const EVERY_MS = 5000;

export function ModelPage() {
  const server = useLoaded((signal) => getJson("server_info", signal), EVERY_MS);
  const info = useLoaded((signal) => getJson("model_info", signal));
  const plugins = useLoaded((signal) => getJson("v1/plugins", signal));
  const problem = server.problem || info.problem || plugins.problem;
  return html`<${Page} title="Model" problem=${problem}>
    ${server.value && info.value && html`<${About} server=${server.value} info=${info.value} /><${Memory} server=${server.value} />`}
    ${plugins.value && html`<${Plugins} listing=${plugins.value} />`}
  <//>`;
}

function About({ server, info }) {
  const { engine } = server;
  const defaults = Object.entries(info.preferred_sampling_params ?? {}).map(([name, value]) => `${name} ${value}`);
  return html`<section class="card" aria-label="About the model">
    <h2>${plain(info.served_model_names[0])}</h2>
    <${Facts} rows=${[
      ["Other names", info.served_model_names.slice(1).join(", ")],
      ["From", info.model_path],
      ["Architecture", info.architecture],
      ["dtype", engine.dtype],
      ["Device", engine.device],
      ["Context", `${count(info.context_length)} tokens`],
      ["Vocabulary", `${count(info.vocab_size)} tokens`],
      ["Attention backend", engine.attention_backend],
      ["Reasoning parser", info.reasoning_parser ?? "none"],
      ["Tool-call parser", info.tool_call_parser ?? "none"],
      ["Default sampling parameters", defaults.join(", ") || "the API's"],
      ["Loaded in", `${engine.load_s.toFixed(1)} s`],
      ["Dovetail", `${server.version}, ${server.status}`],
    ]} />
  </section>`;
}

function Memory({ server }) {
  const { engine } = server;
  const load = server.internal_states[0];
  const parts = [
    ["Weights", engine.weight_bytes, "w"],
    ["KV cache", engine.kv_bytes, "k"],
  ];
  const total = parts.reduce((sum, [, size]) => sum + size, 0);
  const free = load.max_total_tokens - load.num_used_tokens - load.num_cached_tokens;
  const pages = [
    ["In use", load.num_used_tokens, "k"],
    ["Prefix cache", load.num_cached_tokens, "w"],
    ["Free", free, "f"],
  ];
  return html`<section class="card" aria-label="Memory">
    <h2>Memory</h2>
    ${total > 0 && html`<${Parts} label="Bytes of the device" parts=${parts} show=${bytes} />`}
    <h3>KV cache: ${count(load.max_total_tokens)} tokens in pages of ${engine.page_size}</h3>
    <${Parts} label="Tokens of the KV cache" parts=${pages} show=${(size) => `${count(size)} tokens`} />
    <p class="note">At most ${count(engine.max_running_requests)} requests run at once. <code>dovetail plan</code> shows the whole division, before anything is loaded.</p>
  </section>`;
}

/** A bar of parts, and the parts in words. */
function Parts({ label, parts, show }) {
  const total = parts.reduce((sum, [, size]) => sum + Math.max(0, size), 0) || 1;
  let at = 0;
  return html`<figure class="parts">
    <svg viewBox="0 0 1000 24" preserveAspectRatio="none" role="img" aria-label=${`${label}: ${parts.map(([name, size]) => `${name} ${show(size)}`).join(", ")}`}>
      ${parts.map(([name, size, kind]) => {
        const x = at;
        const width = (Math.max(0, size) / total) * 1000;
        at += width;
        return html`<rect key=${name} class=${`part-${kind}`} x=${x} width=${width} height="24" />`;
      })}
    </svg>
    <figcaption>${parts.map(([name, size, kind]) => html`<span key=${name}><i class=${`part-${kind}`}></i>${name} <b>${show(size)}</b></span>`)}</figcaption>
  </figure>`;
}

function Plugins({ listing }) {
  const [query, setQuery] = useState("");
  const [onlyUsed, setOnlyUsed] = useState(true);
  const isUsed = (one) => one.state !== "found";
  const used = listing.data.filter(isUsed);
  const rows = listing.data.filter(
    (one) => (!onlyUsed || isUsed(one) || !used.length) && `${one.kind} ${one.name} ${one.distribution}`.toLowerCase().includes(query.toLowerCase()),
  );
  return html`<section class="card" aria-label="Plugins">
    <h2>Plugins</h2>
    <div class="line">
      <input type="search" aria-label="Find a plugin" placeholder="Find" value=${query} onInput=${(event) => setQuery(event.target.value)} />
      <label class="check"><input type="checkbox" checked=${onlyUsed} onChange=${(event) => setOnlyUsed(event.target.checked)} /> Only those in use</label>
    </div>
    ${(listing.problems ?? []).map((problem) => html`<p class="problem">${plain(String(problem))}</p>`)}
    <div class="scrolls" tabindex="0" role="region" aria-label="Table of plugins"><table class="rows">
      <thead><tr><th>Kind</th><th>Name</th><th>From</th><th>State</th><th>Why</th></tr></thead>
      <tbody>${rows.map(
        (one) => html`<tr key=${`${one.kind}:${one.distribution}:${one.name}`}><td>${one.kind.replaceAll("_", " ")}</td><td><code>${plain(one.name)}</code></td>
          <td>${plain(one.distribution)} ${one.version ?? ""}</td><td>${one.state}</td><td>${plain(one.reason ?? "")}</td></tr>`,
      )}</tbody>
    </table></div>
    <p class="note">${rows.length} of ${listing.data.length} installed.</p>
  </section>`;
}
