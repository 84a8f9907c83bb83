// Light or dark: as chosen by hand, else as the system has it. `theme.js` sets it before the first paint.

const dark = matchMedia("(prefers-color-scheme: dark)");

/** The theme that is shown. */
export const theme = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");

/** Changes to the other one, and remembers it. */
export function changeTheme() {
    const other = theme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = other;
    localStorage.setItem("plimsoll-theme", other);
}

/** What to do when the system's has changed. */
export const onSystemTheme = (then) => dark.addEventListener("change", then);
