// How a VM stands, a state, a verdict: always by shape and word, the colour only repeats it.

import { h, s } from "./dom.js";

const STATUSES = {
    violating: { word: "violating", more: "Misses more than its limit allows" },
    tight: { word: "tight", more: "Within its limit, can give nothing" },
    safe: { word: "safe", more: "Within its limit, could give memory" },
    unknown: { word: "unknown", more: "No curve yet" },
};

/** Worst first. */
export const ORDER = Object.keys(STATUSES);
export const meaning = (status) => STATUSES[status]?.more ?? "";

const SHAPES = {
    // A circle afloat: the line is well above the water.
    safe: () => [s("circle", { cx: 8, cy: 8, r: 7 }), s("path", { class: "sign", d: "M4.6 8.3l2.3 2.3 4.4-4.9" })],
    tight: () => [s("path", { d: "M8 .9L15.4 14.6H.6z" }), s("path", { class: "sign", d: "M4.6 11.2h6.8" })],
    violating: () => [
        s("path", { d: "M8 .4L15.6 8 8 15.6.4 8z" }),
        s("path", { class: "sign", d: "M8 4.4v4.4M8 11.2v.2" }),
    ],
    unknown: () => [s("circle", { class: "hollow", cx: 8, cy: 8, r: 6.2 })],
};

export function shape(status) {
    return s(
        "svg",
        { class: `shape ${SHAPES[status] ? status : "unknown"}`, viewBox: "0 0 16 16", "aria-hidden": "true" },
        (SHAPES[status] ?? SHAPES.unknown)(),
    );
}

/** Shape and word. */
export const badge = (status) =>
    h("span", { class: `badge ${status}`, title: meaning(status) }, shape(status), h("span", {}, status));

const STATES = {
    proposed: "unknown",
    superseded: "unknown",
    moving: "tight",
    checking: "tight",
    kept: "safe",
    "rolled-back": "violating",
    partly: "tight",
    failed: "violating",
    stopped: "tight",
};

/** What has become of a decision. */
export const state = (name) => mark(STATES[name] ?? "unknown", name.replaceAll("-", " "));

const VERDICTS = { kept: "safe", broken: "violating", unknown: "unknown" };

export const verdict = (name) => mark(VERDICTS[name] ?? "unknown", name);

/** Any word beside the shape of a status. */
export const mark = (status, word) => h("span", { class: `badge ${status}` }, shape(status), h("span", {}, word));

/** What tells that a VM's times are not those of hardware. */
export const accelerator = (name) =>
    name === "tcg"
        ? h(
              "span",
              { class: "tag", title: "Runs under TCG: its CPU is emulated, and its speed does not carry over to hardware" },
              "emulated",
          )
        : name
          ? h("span", { class: "tag plain" }, name)
          : null;

/** That its CPUs do not run, and in which state of QEMU. */
export const stopped = (state) =>
    state ? h("span", { class: "tag", title: "Its CPUs do not run: what it uses is not observed meanwhile" }, state) : null;
