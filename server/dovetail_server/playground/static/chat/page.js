// Chat: the list of conversations, the one that is open, and its settings.
import { html, useCallback, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "../core/html.js";
import { facts, watchFacts } from "../core/facts.js";
import { examplePicture, hold, previewOf } from "../core/images.js";
import { rememberSettings } from "../core/settings.js";
import { save } from "../core/store.js";
import { newId } from "../core/tree.js";
import { IconButton } from "../parts/buttons.js";
import { ProgramDialog } from "../parts/program.js";
import { plain, unordered } from "../parts/text.js";
import { Composer } from "./composer.js";
import { ConversationList } from "./list.js";
import { Message } from "./message.js";
import { amend, answerCalls, find, fresh, isRunning, reply, requestOf, resume, send, stop } from "./session.js";
import { SettingsForm } from "./settings.js";

const IDEAS = ["What is the capital of France?", "Tell me a joke about programming", "9.11 and 9.8, which is greater?", "List 3 countries and their capitals."];
const OF_PICTURE = "Which number is this?";
const GONE = "This conversation is not in this browser any more. What you type begins a new one.";

export function ChatPage({ id }) {
  const [conversation, setConversation] = useState(() => fresh());
  const [notice, setNotice] = useState("");
  const [draft, setDraft] = useUnsent("draft");
  const [files, setFiles] = useUnsent("files");
  const [panel, setPanel] = useState(null); // of the two at the sides, the one that is open on a small screen
  const [hasSettings, setHasSettings] = useState(innerWidth > 1100);
  const [program, setProgram] = useState(null);
  const [said, setSaid] = useState("");
  const [, redraw] = useReducer((count) => count + 1, 0);

  useEffect(() => watchFacts(redraw), []);
  useEffect(() => conversation.subscribe(redraw), [conversation]);
  useEffect(() => {
    if (id === conversation.id) return;
    setNotice("");
    if (!id) setConversation(fresh());
    else {
      find(id).then((found) => {
        setConversation(found ?? fresh());
        if (!found) setNotice(GONE);
      });
    }
  }, [id]);

  const path = conversation.path();
  const runs = isRunning(conversation);

  /** Begin something that ends in a reply; false where the settings do not allow it. */
  const begin = (work) => {
    // Looked up now: a key may come before the settings that were just typed have been drawn.
    const problem = Object.values(requestOf(conversation, []).problems)[0];
    if (problem) {
      setNotice(`Not sent. ${problem}`);
      setHasSettings(true);
      if (innerWidth <= 1100) setPanel("settings");
      return false;
    }
    setNotice("");
    setSaid("The reply is being written.");
    work().then((node) => setSaid(spoken(node)));
    if (id !== conversation.id) location.hash = `#/chat/${conversation.id}`;
    return true;
  };
  const actions = {
    choose: (node) => (conversation.choose(node), save(conversation)),
    edit: (node, text) => begin(() => send(conversation, text, node.parent, text, node.images?.filter(({ problem }) => !problem))),
    amend: (node, text) => (amend(conversation, node, text), true),
    resume: (node) => begin(() => resume(conversation, node)),
    retry: (node) => begin(() => reply(conversation, node.parent)),
    answer: (node, answers) => begin(() => answerCalls(conversation, node, answers)),
    program: (node) => setProgram(requestOf(conversation, path.slice(0, path.indexOf(node)), true).body),
    branch: async (node) => {
      const copy = conversation.branch(node);
      await save(copy);
      location.hash = `#/chat/${copy.id}`;
    },
  };
  const latest = useRef(actions);
  latest.current = actions;
  const change = (changes) => {
    Object.assign(conversation.settings, changes);
    rememberSettings(conversation.settings);
    if (path.length) save(conversation);
    redraw();
  };
  const onSend = (text, words, images = []) => {
    if (isRunning(conversation)) return;
    if (!begin(() => send(conversation, text, conversation.path().at(-1)?.id ?? "", words, hold(images)))) return;
    setDraft("");
    setFiles([]);
  };
  const onPicture = async () => onSend(OF_PICTURE, OF_PICTURE, [{ id: newId(), ...(await examplePicture()) }]);
  const onNew = () => {
    setPanel(null);
    setNotice("");
    if (location.hash !== "#/chat") location.hash = "#/chat";
    else setConversation(fresh());
    document.getElementById("composer")?.focus();
  };
  useEffect(() => {
    const key = (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
      const pressed = `${event.shiftKey ? "shift " : ""}${event.key.toLowerCase()}`;
      if (pressed === "shift o") onNew();
      else if (pressed === "k") setPanel((shown) => (innerWidth <= 768 ? "list" : shown));
      else return;
      event.preventDefault();
      if (pressed === "k") requestAnimationFrame(() => requestAnimationFrame(() => document.getElementById("search")?.focus()));
    };
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  }, []);
  const editLast = () => [...document.querySelectorAll(".asked .edit")].at(-1)?.click();
  const closeOnEscape = (event) => event.key === "Escape" && panel && setPanel(null);

  return html`<div class=${`chat ${panel ? `open-${panel}` : ""} ${hasSettings ? "" : "without-settings"}`} onKeyDown=${closeOnEscape}>
    <${ConversationList} current=${conversation.id} onNew=${onNew} onLeave=${() => setPanel(null)} />
    <main id="page" class="talk" aria-label="Conversation">
      <div class="bar">
        <${IconButton} icon="menu" label="Conversations" class="quiet small-only" aria-expanded=${panel === "list"} onClick=${() => setPanel(panel === "list" ? null : "list")} />
        <h1 dir="auto" title=${conversation.title}>${plain(conversation.title) || "New conversation"}</h1>
        <${IconButton} icon="plus" label="New conversation" class="quiet small-only" onClick=${onNew} />
        <${IconButton} icon="code" label="Show code" disabled=${!path.length} onClick=${() => setProgram(requestOf(conversation, path, true).body)} />
        <${IconButton} icon="sliders" label="Settings" aria-expanded=${panel === "settings" || hasSettings}
          onClick=${() => (innerWidth <= 1100 ? setPanel(panel === "settings" ? null : "settings") : setHasSettings(!hasSettings))} />
      </div>
      <${Messages} conversation=${conversation} path=${path} actions=${latest} onIdea=${(idea) => onSend(idea)} onPicture=${onPicture} />
      <div class="foot">
        ${notice && html`<p class="problem" role="alert">${notice}</p>`}
        <${Composer} draft=${draft} setDraft=${setDraft} files=${files} setFiles=${setFiles} sent=${path.flatMap(({ images }) => images ?? []).filter(previewOf)} isRunning=${runs} canSend=${facts.state === "known"} onSend=${onSend}
          onStop=${() => stop(conversation)} onEditLast=${editLast} />
      </div>
      <p class="unseen" role="status">${said}</p>
    </main>
    <aside class="side" aria-label="Settings">
      <header class="small-only"><h2>Settings</h2><${IconButton} icon="close" label="Close settings" onClick=${() => setPanel(null)} /></header>
      <${SettingsForm} settings=${conversation.settings} change=${change} />
    </aside>
    ${panel && html`<div class="shade" onClick=${() => setPanel(null)}></div>`}
    ${program && html`<${ProgramDialog} body=${program} onClose=${() => setProgram(null)} />`}
  </div>`;
}

const unsent = { draft: "", files: [] }; // outlives a look at another page

function useUnsent(name) {
  const [value, setValue] = useState(unsent[name]);
  const set = (next) => setValue((unsent[name] = typeof next === "function" ? next(unsent[name]) : next));
  return [value, set];
}

function spoken(node) {
  if (node.state === "failed") return "";
  if (node.state === "stopped") return "The reply was stopped.";
  const calls = node.calls.map((call) => `It calls ${call.name}.`).join(" ");
  return unordered(`The reply is: ${node.content.slice(0, 2000)} ${calls}`);
}

function Messages({ conversation, path, actions, onIdea, onPicture }) {
  const scroller = useRef(null);
  const follows = useRef(true);
  const [isAway, setIsAway] = useState(false);
  const onScroll = useCallback(() => {
    const { scrollTop, scrollHeight, clientHeight } = scroller.current;
    follows.current = scrollHeight - scrollTop - clientHeight < 60;
    setIsAway(!follows.current);
  }, []);
  const follow = useCallback(() => {
    if (follows.current && scroller.current) scroller.current.scrollTop = scroller.current.scrollHeight;
  }, []);
  useLayoutEffect(follow);
  const end = () => {
    follows.current = true;
    scroller.current.scrollTop = scroller.current.scrollHeight;
  };
  useEffect(end, [conversation.id, path.length]);
  if (!path.length) {
    const sees = facts.info?.max_images > 0;
    return html`<div class="messages" ref=${scroller}><div class="welcome">
      <h2>What would you like to know?</h2>
      <p>${facts.names[0] ? html`You are talking with <strong>${facts.names[0]}</strong>.` : facts.problem}</p>
      <ul>${sees && html`<li><button type="button" class="idea" disabled=${facts.state !== "known"} onClick=${onPicture}>${OF_PICTURE} (with a picture)</button></li>`}
      ${IDEAS.slice(sees).map((idea) => html`<li key=${idea}><button type="button" class="idea" disabled=${facts.state !== "known"} onClick=${() => onIdea(idea)}>${idea}</button></li>`)}</ul>
    </div></div>`;
  }
  return html`<div class="messages" ref=${scroller} onScroll=${onScroll} tabindex="0" role="region" aria-label="Messages">
    <div class="column">${path.map(
      (node, i) => html`<${Kept} key=${node.id} conversation=${conversation} node=${node} onGrown=${follow} siblings=${conversation.siblings(node)} isLast=${i === path.length - 1} actions=${actions} />`,
    )}</div>
    ${isAway && html`<${IconButton} icon="down" label="To the end" class="quiet to-end" onClick=${end} />`}
  </div>`;
}

/** A message is laid out again only when it has changed; one that grows, alone. */
function Kept({ conversation, node, siblings, isLast, actions, onGrown }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  useEffect(() => conversation.watch(node, redraw), [conversation, node]);
  useLayoutEffect(onGrown, [node.version]);
  const call = (name) => (...given) => actions.current[name](...given);
  const stable = useMemo(() => Object.fromEntries(["choose", "edit", "amend", "resume", "retry", "answer", "program", "branch"].map((name) => [name, call(name)])), []);
  return useMemo(
    () => html`<${Message} node=${node} siblings=${siblings} isLast=${isLast} actions=${stable} />`,
    [node, node.version, siblings.length, isLast],
  );
}
