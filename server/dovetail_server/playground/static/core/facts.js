// What the page must know of the server before it can ask anything: the names of its model, its limits, its defaults.
import { getJson } from "./api.js";

const AGAIN_MS = 1500;

export const facts = { state: "asking", problem: "", names: [], info: null };
const listeners = new Set();

export function watchFacts(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function set(changes) {
  Object.assign(facts, changes);
  for (const listener of listeners) listener();
}

/** Ask until the server has answered: it may still be loading its model, or be away. */
export async function learn() {
  for (;;) {
    try {
      const [models, info] = await Promise.all([getJson("v1/models"), getJson("model_info")]);
      set({ state: "known", problem: "", names: models.data.map((one) => one.id), info });
      return;
    } catch (error) {
      set({ state: error.status === 401 ? "locked" : "away", problem: error.message });
      if (error.status === 401) return;
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}
