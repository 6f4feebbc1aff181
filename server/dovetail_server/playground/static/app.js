// The page: its pages by the address behind #, and what stands above them all.
import { html, render, useEffect, useErrorBoundary, useReducer, useState } from "./core/html.js";
import { facts, learn, watchFacts } from "./core/facts.js";
import { isDark, restoreTheme, toggleTheme } from "./core/theme.js";
import { ChatPage } from "./chat/page.js";
import { IconButton } from "./parts/buttons.js";
import { KeyDialog } from "./parts/key.js";

// Each with what loads it when it is first opened.
const PAGES = {
  chat: ["Chat"],
  complete: ["Complete", async () => (await import("./complete/page.js")).CompletePage],
  compare: ["Compare", async () => (await import("./compare/page.js")).ComparePage],
  model: ["Model", async () => (await import("./model/page.js")).ModelPage],
  batches: ["Batches", async () => (await import("./batches/page.js")).BatchesPage],
  live: ["Live", async () => (await import("./live/page.js")).LivePage],
};

function route() {
  const [, page = "", id = ""] = location.hash.split("/");
  return { page: Object.hasOwn(PAGES, page) ? page : "chat", id };
}

/** A page that is loaded when it is opened. */
function Lazy({ page }) {
  const [found, setFound] = useState({ page: "", Kind: null, problem: "" });
  useEffect(() => {
    let isWanted = true;
    const set = (what) => isWanted && setFound({ page, Kind: null, problem: "", ...what });
    PAGES[page][1]().then((Kind) => set({ Kind }), () => set({ problem: "The server does not answer; this page could not be loaded." }));
    return () => (isWanted = false);
  }, [page]);
  if (found.page !== page) return html`<main id="page" class="page" aria-busy="true"></main>`;
  return found.Kind ? html`<${found.Kind} />` : html`<main id="page" class="page"><p class="problem">${found.problem}</p></main>`;
}

function Status() {
  const [, redraw] = useReducer((count) => count + 1, 0);
  useEffect(() => watchFacts(redraw), []);
  if (facts.state === "known" || facts.state === "asking") return null;
  return html`<p class="banner" role="status">${facts.problem}
    ${facts.state === "locked" && html` <button type="button" class="plain" onClick=${learn}>Give a key</button>`}
  </p>`;
}

function App() {
  const [{ page, id }, setRoute] = useState(route());
  const [isNight, setIsNight] = useState(isDark());
  const [error, recover] = useErrorBoundary((what) => console.error(what));
  useEffect(() => {
    const changed = () => {
      setRoute(route());
      recover();
    };
    addEventListener("hashchange", changed);
    learn();
    return () => removeEventListener("hashchange", changed);
  }, []);
  const switchTheme = () => {
    toggleTheme();
    setIsNight(isDark());
  };
  return html`
    <a class="skip" href="#page" onClick=${skip}>Skip to the page</a>
    <header class="top">
      <a class="brand" href="#/chat"><img src=${new URL("icon.svg", import.meta.url).href} alt="" width="24" height="24" />Dovetail</a>
      <nav aria-label="Pages">${Object.entries(PAGES).map(
        ([name, [label]]) => html`<a key=${name} href=${`#/${name}`} aria-current=${name === page ? "page" : undefined}>${label}</a>`,
      )}</nav>
      <${IconButton} icon=${isNight ? "sun" : "moon"} label=${isNight ? "Light" : "Dark"} onClick=${switchTheme} />
    </header>
    <${Status} />
    ${
      error
        ? html`<main id="page" class="page"><h1>This page has an error</h1><p class="problem">${String(error)}</p><p>Your conversations are kept.</p>
            <button type="button" onClick=${recover}>Show the page again</button></main>`
        : page === "chat"
          ? html`<${ChatPage} id=${id} />`
          : html`<${Lazy} page=${page} />`
    }
    <${KeyDialog} />`;
}

function skip(event) {
  event.preventDefault();
  document.querySelector("#page textarea, #page input, #page button, #page [tabindex]")?.focus();
}

restoreTheme();
const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
