// Preact with htm in place of JSX: what lies in vendor/ under one name.
import { h, options, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

// One render a frame, however many tokens came since the last one.
options.debounceRendering = (callback) => requestAnimationFrame(callback);

export const html = htm.bind(h);
export { render };
export {
  useCallback,
  useEffect,
  useErrorBoundary,
  useId,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
} from "../vendor/preact-hooks.js";
