// Icons as strokes on a grid of 24.
import { html } from "../core/html.js";

const PATHS = {
  send: "M12 19V5M5 12l7-7 7 7",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 12l5 5 9-10",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  retry: "M20 12a8 8 0 1 1-2.3-5.7M20 4v4h-4",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  download: "M12 4v11M7 10l5 5 5-5M5 20h14",
  down: "M12 5v14M5 12l7 7 7-7",
  play: "M8 5l11 7-11 7z",
  clip: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.5 3.5 0 0 1 5 5l-8.5 8.5a1.8 1.8 0 0 1-2.6-2.6L15 7",
  plus: "M12 5v14M5 12h14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5L19 19M5 19l1.5-1.5M17.5 6.5L19 5",
  moon: "M20 14A8.5 8.5 0 0 1 10 4a8.5 8.5 0 1 0 10 10z",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M13 5v4M9 15v4",
  menu: "M4 7h16M4 12h16M4 17h16",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 2-2 5 5M15 9h.01",
  close: "M6 6l12 12M18 6L6 18",
  code: "M9 7l-5 5 5 5M15 7l5 5-5 5",
  branch: "M7 4v16M7 14c8 0 10-2 10-7M14 9l3-3 3 3",
  grid: "M5 5h6v6H5zM13 5h6v6h-6zM5 13h6v6H5zM13 13h6v6h-6z",
  tool: "M14 6a4 4 0 0 0-5 5l-5 5 4 4 5-5a4 4 0 0 0 5-5l-3 3-3-1-1-3z",
  key: "M14 10a4 4 0 1 0-1.5 3.1L14 14.5V17h2.5v2.5H20V17l-6-6",
};

export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}
