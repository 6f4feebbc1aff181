// Light or dark: the system's choice until somebody makes one here.

const KEY = "dovetail-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : dark.matches;
}

export function restoreTheme() {
  let chosen = null;
  try {
    chosen = localStorage.getItem(KEY);
  } catch {
    // The browser keeps nothing.
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
}

export function toggleTheme() {
  const chosen = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  try {
    localStorage.setItem(KEY, chosen);
  } catch {
    // It holds for this window.
  }
}
