// The host at a glance: who is safe, tight or violating, where the memory is, what could be taken, and what would happen
// if the host lost some.

import { scale, steps, whisker } from "./chart.js";
import { proposalBanner } from "./decisions.js";
import { h, s } from "./dom.js";
import { accelerator, badge, meaning, ORDER, shape, stopped } from "./status.js";
import { app, askLose, update, wantTrend } from "./store.js";
import { bytes, change, duration, MIB, margins, plural, size, times } from "./units.js";

export function hostView() {
    const { host } = app;
    return h(
        "div",
        { class: "view" },
        h("h1", { class: "unseen" }, `Host ${host.host}`),
        proposalBanner(),
        warnings(host),
        statuses(host),
        daemonStrip(host),
        memoryPanel(host),
        losePanel(host),
        vmsPanel(host),
        groupsPanel(host),
    );
}

const WARNINGS_SHOWN = 5;

function warnings({ warnings: told }) {
    const list = (texts) =>
        h(
            "ul",
            {},
            texts.map((text) => h("li", {}, shape("tight"), h("span", {}, text))),
        );
    const folded = told.slice(WARNINGS_SHOWN);
    return (
        told.length > 0 &&
        h(
            "section",
            { class: "warnings", "aria-label": "Warnings" },
            list(told.slice(0, WARNINGS_SHOWN)),
            folded.length > 0 &&
                h("details", {}, h("summary", {}, `${folded.length} more of ${plural(told.length, "warning")}`), list(folded)),
        )
    );
}

function statuses({ vms, memory }) {
    const tile = (status) => {
        const number = vms.filter((vm) => vm.status === status).length;
        const only = app.only === status;
        return h(
            "button",
            {
                key: status,
                class: `tile ${status} ${number ? "" : "zero"}`,
                "aria-pressed": String(only),
                title: `${meaning(status)}. Show only these`,
                onclick: () => {
                    app.only = only ? null : status;
                    update();
                },
            },
            h("span", { class: "number" }, String(number)),
            h("span", { class: "word" }, shape(status), status),
        );
    };
    return h(
        "section",
        { class: "tiles", "aria-label": "VMs by status" },
        ORDER.map(tile),
        h(
            "div",
            { class: "tile give", title: "Memory that can be reclaimed from the VMs now, within all limits" },
            h("span", { class: "number" }, size(memory.reclaimable_bytes, { id: "reclaimable" })),
            h("span", { class: "word" }, "could be taken"),
        ),
    );
}

const MODES = {
    observe: "traces and shows, moves nothing",
    advise: "proposes moves; you apply them",
    act: "moves memory by itself",
};

const PHASES = [
    ["whole", "Whole", "All memory is in the VMs themselves."],
    ["shrinking", "Shrinking", "Their memory is being moved into the caches under their disks."],
    ["tracing", "Tracing", "They are traced through the caches."],
    ["moving", "Moving", "Memory goes from some VMs to others."],
    ["checking", "Checking", "The result of the move is being measured."],
    ["giving-back", "Giving back", "The caches' memory is being returned to the VMs."],
];

function daemonStrip(host) {
    const phase = PHASES.findIndex(([name]) => name === host.phase);
    const [, word, text] = PHASES[phase] ?? [null, host.phase, ""];
    return h(
        "dl",
        { class: "strip" },
        h(
            "div",
            {},
            h("dt", {}, "Mode"),
            h(
                "dd",
                {},
                h("b", { id: "mode" }, host.paused ? `${host.mode}, paused` : host.mode),
                h("small", {}, host.paused ? "moves nothing until resumed" : (MODES[host.mode] ?? "")),
            ),
        ),
        h(
            "div",
            {},
            h("dt", {}, "Phase"),
            h(
                "dd",
                {},
                h(
                    "b",
                    { id: "phase" },
                    word,
                    h(
                        "span",
                        { class: "dots", "aria-hidden": "true" },
                        PHASES.map((_, index) => h("i", { class: index === phase ? "on" : null })),
                    ),
                ),
                h("small", {}, text),
            ),
        ),
        h(
            "div",
            {},
            h("dt", {}, "Turn"),
            h(
                "dd",
                {},
                h("b", {}, `${host.turn}`),
                h(
                    "small",
                    {},
                    `every ${duration(host.turn_interval_ms)}, the last took ${duration(host.turn_took_ms)}`,
                ),
            ),
        ),
        h(
            "div",
            {},
            h("dt", {}, "Move under way"),
            h(
                "dd",
                {},
                h(
                    "b",
                    {},
                    host.moving === null
                        ? "none"
                        : h("a", { href: `#/decisions/${host.moving}` }, `decision ${host.moving}`),
                ),
                h("small", {}, host.moving === null ? "nothing is being moved" : "memory is on its way"),
            ),
        ),
    );
}

/** The terms of the host's memory, which together are its bar. */
function terms({ total_bytes, divided_bytes, vms_direct_bytes, vms_cache_bytes, store_bytes, spare_bytes }) {
    return [
        ["direct", "VMs' own", vms_direct_bytes, "In the VMs: their RAM less their balloons."],
        [
            "cache",
            "Disk caches",
            vms_cache_bytes,
            "Capacity of the exclusive caches under the VMs' disks. It serves the VM whose disk it is.",
        ],
        ["store", "Page store", store_bytes, "Capacity of the page store that VMs share."],
        ["spare", "Spare", spare_bytes, "Allocatable, but not allocated."],
        [
            "outside",
            "Not divided",
            Math.max(0, total_bytes - divided_bytes),
            "The rest of the host's RAM: kernel, page cache, other processes, and what is free. Plimsoll leaves it alone.",
        ],
    ];
}

let pointedTerm = null;

function memoryPanel({ memory }) {
    const all = terms(memory);
    const whole = Math.max(memory.total_bytes, memory.divided_bytes, 1);
    const share = (value) => `${(100 * Math.min(value, whole)) / whole}%`;
    const extra = [
        [
            "could",
            "Could be taken",
            memory.reclaimable_bytes,
            "Part of the VMs' memory: can be reclaimed from them now, within all limits.",
        ],
        [
            "available",
            "Available",
            memory.available_bytes,
            "Memory that the kernel can provide without swapping (MemAvailable). It overlaps the terms above: memory given to a VM but never accessed is still available.",
        ],
    ];
    const pointed = [...all, ...extra].find(([name]) => name === pointedTerm);
    const point = (name) => () => {
        pointedTerm = name;
        update();
    };
    const item = ([name, word, value, text]) =>
        h(
            "li",
            { key: name },
            h(
                "button",
                {
                    class: `term ${name}`,
                    "aria-describedby": `term-${name}`,
                    onclick: point(name),
                    onfocus: point(name),
                    onblur: point(null),
                    onpointerenter: point(name),
                    onpointerleave: point(null),
                },
                h("i", { class: "swatch", "aria-hidden": "true" }),
                h("span", {}, word),
                size(value, { id: `memory-${name}` }),
            ),
            h("span", { class: "unseen", id: `term-${name}` }, text),
        );
    const vms = memory.vms_direct_bytes + memory.vms_cache_bytes;
    const over = memory.divided_bytes > memory.total_bytes;
    return h(
        "section",
        { class: "panel", "aria-labelledby": "memory-title" },
        h(
            "div",
            { class: "panel-head" },
            h("h2", { id: "memory-title" }, "Memory"),
            h(
                "p",
                { class: "sum" },
                size(memory.total_bytes, { id: "memory-total" }),
                " of RAM, ",
                size(memory.divided_bytes, { id: "memory-divided" }),
                " of it allocated by Plimsoll",
            ),
            over &&
                h(
                    "p",
                    { class: "over" },
                    `${bytes(memory.divided_bytes - memory.total_bytes)} more is allocated than exists`,
                ),
        ),
        h(
            "div",
            {
                class: "stack",
                role: "img",
                "aria-label": all.map(([, word, value]) => `${word} ${bytes(value)}`).join(", "),
            },
            all.map(
                ([name, word, value]) =>
                    value > 0 &&
                    h(
                        "div",
                        {
                            key: name,
                            class: `part ${name} ${pointedTerm && pointedTerm !== name && all.includes(pointed) ? "dim" : ""}`,
                            look: { "flex-grow": value / whole, "flex-basis": 0 },
                        },
                        h("span", {}, word),
                        h("b", {}, bytes(value)),
                    ),
            ),
        ),
        h(
            "div",
            { class: "spans", "aria-hidden": "true" },
            memory.reclaimable_bytes > 0 &&
                h("div", {
                    class: "span could",
                    look: {
                        left: share(Math.max(0, vms - memory.reclaimable_bytes)),
                        width: share(Math.min(vms, memory.reclaimable_bytes)),
                    },
                }),
            h("div", { class: "span available", look: { right: 0, width: share(memory.available_bytes) } }),
            over && h("div", { class: "end", look: { left: share(memory.total_bytes) } }),
        ),
        h("ul", { class: "terms" }, all.map(item), extra.map(item)),
        h(
            "p",
            { class: "definition" },
            pointed ? [h("b", {}, `${pointed[1]}: `), pointed[3]] : "Point at a term to read its definition.",
        ),
    );
}

const byName = (a, b) => a.vm.localeCompare(b.vm, "en", { numeric: true });
const SORTS = {
    status: ["Status", (a, b) => ORDER.indexOf(a.status) - ORDER.indexOf(b.status) || byName(a, b)],
    name: ["VM", byName],
    size: ["Size", (a, b) => b.size_bytes - a.size_bytes],
    misses: ["Misses", (a, b) => (b.relative?.expected ?? -1) - (a.relative?.expected ?? -1)],
    give: ["Could give", (a, b) => (b.reclaimable_bytes ?? -1) - (a.reclaimable_bytes ?? -1)],
};

function vmsPanel({ vms }) {
    const shown = vms.filter((vm) => !app.only || vm.status === app.only).toSorted(SORTS[app.sort][1]);
    const column = (sort, text, title) =>
        h(
            "div",
            {
                role: "columnheader",
                class: `c-${sort ?? "plain"}`,
                "aria-sort":
                    sort && app.sort === sort
                        ? sort === "name" || sort === "status"
                            ? "ascending"
                            : "descending"
                        : null,
                title,
            },
            sort
                ? h(
                      "button",
                      {
                          class: "sort",
                          onclick: () => {
                              app.sort = sort;
                              update();
                          },
                      },
                      text,
                  )
                : text,
        );
    return h(
        "section",
        { class: "panel", "aria-labelledby": "vms-title" },
        h(
            "div",
            { class: "panel-head" },
            h("h2", { id: "vms-title" }, "Virtual machines"),
            h(
                "p",
                { class: "sum" },
                app.only ? `${shown.length} of ${vms.length}, ${app.only}` : plural(vms.length, "VM"),
            ),
            app.only &&
                h(
                    "button",
                    {
                        class: "plain small",
                        onclick: () => {
                            app.only = null;
                            update();
                        },
                    },
                    "Show all",
                ),
            vms.length > 0 &&
                h(
                    "ul",
                    { class: "key", "aria-label": "Marks on the bars" },
                    h("li", {}, h("i", { class: "swatch direct" }), "own"),
                    h("li", {}, h("i", { class: "swatch cache" }), "cache"),
                    h("li", {}, h("i", { class: "tick promise" }), "limit: smallest size"),
                    h("li", {}, h("i", { class: "tick target" }), "target"),
                    h("li", {}, h("i", { class: "tick baseline" }), "baseline"),
                ),
        ),
        vms.length === 0
            ? h(
                  "div",
                  { class: "empty small" },
                  h("p", {}, h("b", {}, "No VMs.")),
                  h(
                      "p",
                      {},
                      "plimsolld searches for QEMU processes",
                      " (and libvirt's VMs where that is configured) each turn. Start one with ",
                      h("code", {}, "plimsoll run -- qemu-system-x86_64 …"),
                      ", or see with ",
                      h("code", {}, "plimsoll doctor"),
                      " what hides them.",
                  ),
              )
            : shown.length === 0
              ? h("div", { class: "empty small" }, h("p", {}, `No VM is ${app.only}.`))
              : h(
                    "div",
                    { class: "vms", role: "table", "aria-labelledby": "vms-title" },
                    h(
                        "div",
                        { role: "rowgroup" },
                        h(
                            "div",
                            { role: "row", class: "vm-row heads" },
                            column("name", SORTS.name[0]),
                            column("status", SORTS.status[0]),
                            column("size", SORTS.size[0], "Guest memory plus the cache under its disk"),
                            column(null, "Working set", "Working set, by its curve"),
                            column(
                                "misses",
                                "Misses",
                                "Predicted misses at its size relative to the baseline, with the curve's confidence band; the tick is its limit",
                            ),
                            column(null, "Last hour", "Size (area) and working set (line)"),
                            column("give", SORTS.give[0], "Memory that it could give within its limit"),
                        ),
                    ),
                    h("div", { role: "rowgroup" }, shown.map(vmRow)),
                ),
    );
}

/** The control groups that are watched, and an account of those that are not. */
function groupsPanel({ groups }) {
    const { watched, left_out: leftOut } = groups;
    if (watched.length + leftOut.length === 0) return false;
    const head = (text, title) => h("th", { scope: "col", title }, text);
    const tracing = ({ trace, warnings: told }) => told[0] ?? trace?.state ?? "not traced";
    return h(
        "section",
        { class: "panel", "aria-labelledby": "groups-title" },
        h(
            "div",
            { class: "panel-head" },
            h("h2", { id: "groups-title" }, "Control groups"),
            h("p", { class: "sum" }, `${watched.length} watched; they are only observed, and no allocation counts them`),
        ),
        watched.length > 0 &&
            h(
                "div",
                { class: "scroll", tabindex: 0, role: "region", "aria-label": "Watched control groups" },
                h(
                    "table",
                    {},
                    h(
                        "thead",
                        {},
                        h(
                            "tr",
                            {},
                            head("Group"),
                            head("Kind"),
                            head("Charged", "Its memory and page cache, with the groups below it"),
                            head("Limit", "Its own limit of memory"),
                            head("Working set", "Working set, by its curve"),
                            head("Tracing"),
                        ),
                    ),
                    h(
                        "tbody",
                        {},
                        watched.map((group) =>
                            h(
                                "tr",
                                { key: group.path, "data-group": group.group },
                                h("th", { scope: "row" }, group.group, h("div", { class: "hint" }, group.path)),
                                h("td", {}, group.kind),
                                h("td", {}, size(group.charged_bytes, { class: "charged" })),
                                h("td", {}, group.limit_bytes === null ? "none" : size(group.limit_bytes)),
                                h("td", { class: "working-set" }, workingSet(group.working_set)),
                                h("td", { class: "why" }, tracing(group)),
                            ),
                        ),
                    ),
                ),
            ),
        leftOut.map(({ why, count, paths }) =>
            h("p", { key: why, class: "hint left-out", title: paths.join("\n") }, `${plural(count, "group")} not watched: ${why}.`),
        ),
    );
}

export const BOUNDS = { estimate: "≈ ", at_least: "≥ ", at_most: "≤ " };

/** A working set, with the sign of its bound. */
export const workingSet = (view) =>
    view ? [BOUNDS[view.bound] ?? "", size(view.bytes)] : h("span", { class: "none", title: "Not known yet" }, "–");

function vmRow(vm) {
    const cell = (name, ...content) =>
        h(
            "div",
            {
                role: "cell",
                class: `c-${name}`,
                "data-label": {
                    status: "Status",
                    size: "Size",
                    set: "Working set",
                    misses: "Misses",
                    trend: "Last hour",
                    give: "Could give",
                }[name],
            },
            content,
        );
    return h(
        "div",
        { role: "row", class: `vm-row ${vm.status}`, key: vm.vm, "data-vm": vm.vm },
        h(
            "div",
            { role: "cell", class: "c-name" },
            h("a", { href: `#/vm/${encodeURIComponent(vm.vm)}`, class: "vm-name", title: vm.vm }, vm.vm),
            h(
                "span",
                { class: "tags" },
                accelerator(vm.accelerator),
                stopped(vm.stopped),
                vm.libvirt && h("span", { class: "tag plain" }, "libvirt"),
                !vm.settings.managed &&
                    h("span", { class: "tag plain", title: "The daemon may not resize it" }, "unmanaged"),
            ),
        ),
        cell("status", badge(vm.status), h("small", { class: "why", title: vm.why }, vm.why)),
        cell(
            "size",
            h(
                "div",
                { class: "numbers" },
                size(vm.size_bytes, { class: "size" }),
                vm.target_bytes !== null &&
                    vm.target_bytes !== vm.size_bytes &&
                    h("span", { class: "to" }, " → ", size(vm.target_bytes, { class: "target" })),
            ),
            sizeBar(vm),
        ),
        cell("set", h("span", { class: "working-set" }, workingSet(vm.working_set))),
        cell(
            "misses",
            h(
                "span",
                {
                    class: "relative",
                    title: vm.relative
                        ? `${times(vm.relative.low)} to ${times(vm.relative.high)}; limit ${times(limit(vm.settings))}`
                        : "Not known yet",
                },
                times(vm.relative?.expected),
            ),
            whisker(vm.relative, limit(vm.settings)),
        ),
        cell("trend", trend(vm)),
        cell("give", size(vm.reclaimable_bytes, { class: "reclaimable" })),
    );
}

/** Own memory and cache within what it may have, with marks. */
function sizeBar(vm) {
    const { settings } = vm;
    const most = Math.max(settings.max_bytes, vm.size_bytes, vm.target_bytes ?? 0, 1);
    const at = (value) => `${(100 * Math.min(value, most)) / most}%`;
    const tick = (name, value) =>
        value !== null && value !== undefined && h("i", { class: `tick ${name}`, look: { left: at(value) } });
    const text = [
        `Size ${bytes(vm.size_bytes)}`,
        `own ${bytes(vm.direct_bytes)}, cache ${bytes(vm.cache_bytes)}`,
        `limit at least ${bytes(vm.promise_bytes)}`,
        `baseline ${bytes(settings.baseline_bytes)}`,
        `target ${bytes(vm.target_bytes)}`,
        `at most ${bytes(settings.max_bytes)}`,
    ].join("; ");
    return h(
        "div",
        { class: "bar", role: "img", "aria-label": text, title: text.replaceAll("; ", "\n") },
        h("i", { class: "fill direct", look: { width: at(vm.direct_bytes) } }),
        h("i", { class: "fill cache", look: { left: at(vm.direct_bytes), width: at(Math.min(vm.cache_bytes, most)) } }),
        tick("baseline", settings.baseline_bytes),
        tick("promise", vm.promise_bytes),
        tick("target", vm.target_bytes),
    );
}

/** The limit on a VM's misses over those at its baseline; null if it is not promised one. */
const limit = ({ max_loss }) => (max_loss === null ? null : 1 + max_loss);

const seen = new IntersectionObserver(
    (entries) => {
        for (const { isIntersecting, target } of entries) if (isIntersecting) wantTrend(target.dataset.trend);
    },
    { rootMargin: "200px" },
);

const TREND = { width: 120, height: 30 };

function trend(vm) {
    const { width, height } = TREND;
    const samples = app.trends.get(vm.vm) ?? [];
    const until = app.host.now_unix_ms;
    const x = scale([until - 3_600_000, until], [0, width]);
    const most = Math.max(
        ...samples.map((sample) => Math.max(sample.direct_bytes + sample.cache_bytes, sample.working_set_bytes ?? 0)),
        1,
    );
    const y = scale([0, most * 1.08], [height, 0]);
    const sizes = steps(
        samples.map((sample) => [sample.unix_ms, sample.direct_bytes + sample.cache_bytes]),
        x,
        y,
        until,
    );
    const sets = steps(
        samples.map((sample) => [sample.unix_ms, sample.working_set_bytes]),
        x,
        y,
        until,
    );
    const first = samples.length ? x(samples[0].unix_ms) : 0;
    return s(
        "svg",
        {
            class: "trend",
            viewBox: `0 0 ${width} ${height}`,
            width,
            height,
            "data-trend": vm.vm,
            "aria-hidden": "true",
            onpaint: (element) => seen.observe(element),
        },
        s("line", { class: "base", x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 }),
        sizes && s("path", { class: "area", d: `${sizes}V${height}H${first}Z` }),
        sizes && s("path", { class: "outline", d: sizes }),
        sets && s("path", { class: "set", d: sets }),
    );
}

/** A round step that cuts the range into about so many pieces. */
function roundStep(range) {
    let step = 4 * MIB;
    while (range / step > 256) step *= 2;
    return step;
}

function losePanel({ memory, vms }) {
    const { lose } = app;
    const step = roundStep(memory.divided_bytes);
    const most = Math.floor(memory.divided_bytes / step) * step;
    const set = (value) => {
        lose.bytes = Math.min(most, Math.max(0, value));
        if (!lose.bytes) Object.assign(lose, { answered: 0, answer: null, error: null });
        askLose();
        update();
    };
    return h(
        "section",
        { class: "panel lose", "aria-labelledby": "lose-title" },
        h(
            "div",
            { class: "panel-head" },
            h("h2", { id: "lose-title" }, "If the host lost memory"),
            h("p", { class: "sum" }, "The allocation is recomputed; nothing is moved."),
        ),
        h(
            "div",
            { class: "slider" },
            h("label", { for: "lose" }, "Host loses"),
            h("input", {
                type: "range",
                id: "lose",
                min: 0,
                max: most,
                step,
                value: lose.bytes,
                disabled: vms.length === 0,
                "aria-valuetext": `${bytes(lose.bytes)} of ${bytes(memory.divided_bytes)}`,
                oninput: (event) => set(Number(event.target.value)),
                look: { "--at": most ? lose.bytes / most : 0 },
            }),
            h("output", { for: "lose", id: "lose-value" }, size(lose.bytes)),
            h("button", { class: "plain small", disabled: !lose.bytes, onclick: () => set(0) }, "Reset"),
        ),
        h(
            "div",
            {
                class: "division",
                role: "status",
                "aria-busy": String(lose.answered !== lose.bytes),
                look: lose.bytes ? { "min-height": `${Math.min(vms.length, SHOWN_MAX) * 2.2 + 4.5}rem` } : {},
            },
            division(),
        ),
    );
}

const SHOWN_MAX = 24;
const REASONS = {
    kept: "keeps what it has",
    unknown: "curve not known, keeps what it has",
    "no-working-set": "working set not known, keeps what it has",
    "no-rate": "its curve has no rate, which its limit on misses needs; keeps what it has",
    gains: "benefits most from more memory",
    gives: "others gain more than it loses",
    "gives-to-its-bound": "gives as much as its limit allows",
    limits: "below its floor or above its ceiling",
    "host-short": "the host has less than all have now",
};

function division() {
    const { lose } = app;
    if (!lose.bytes)
        return h(
            "p",
            { class: "hint" },
            "Move the slider to see the allocation with less memory, and the point from which limits cannot be kept.",
        );
    const refusal = lose.error ?? lose.answer?.refusal;
    if (refusal) {
        return h(
            "div",
            { class: "refusal", id: "refusal" },
            shape("violating"),
            h("div", {}, h("b", {}, lose.error ? "No answer" : "Not within all limits"), h("p", {}, refusal)),
        );
    }
    const plan = lose.answer?.plan;
    if (!plan) return h("p", { class: "hint" }, "Asking the allocator …");
    return planTable(plan, lose.answer.lose_bytes);
}

function planTable(plan, lost) {
    const moved = (target) => Math.abs(target.target_bytes - target.current_bytes);
    const targets = plan.targets.toSorted((a, b) => moved(b) - moved(a));
    const most = Math.max(...targets.map((target) => Math.max(target.current_bytes, target.target_bytes)), 1);
    const at = (value) => `${(100 * value) / most}%`;
    return [
        h(
            "p",
            { class: "verdict" },
            shape("safe"),
            h(
                "span",
                {},
                h("b", {}, `${bytes(lost)} less: all limits can be kept. `),
                `Misses relative to the baseline, geometric mean of all: ${times(plan.geometric_mean_now)} now, `,
                h("b", { id: "mean-then" }, times(plan.geometric_mean)),
                " then. ",
                h("span", {}, `${bytes(plan.spare_bytes)} would be spare.`),
            ),
        ),
        h(
            "table",
            { class: "then" },
            h(
                "thead",
                {},
                h(
                    "tr",
                    {},
                    h("th", { scope: "col" }, "VM"),
                    h("th", { scope: "col", class: "picture" }, "Now and then"),
                    h("th", { scope: "col" }, "Then"),
                    h("th", { scope: "col" }, "Change"),
                    h("th", { scope: "col" }, "Misses then"),
                    h("th", { scope: "col", class: "why" }, "Why"),
                ),
            ),
            h(
                "tbody",
                {},
                targets.slice(0, SHOWN_MAX).map((target) =>
                    h(
                        "tr",
                        { key: target.vm, "data-vm": target.vm },
                        h("th", { scope: "row", title: target.vm }, target.vm),
                        h(
                            "td",
                            { class: "picture" },
                            h(
                                "div",
                                { class: "pair", "aria-hidden": "true" },
                                h("i", { class: "before", look: { width: at(target.current_bytes) } }),
                                h("i", { class: "after", look: { width: at(target.target_bytes) } }),
                            ),
                        ),
                        h("td", {}, size(target.target_bytes, { class: "then-size" })),
                        h(
                            "td",
                            {},
                            target.target_bytes === target.current_bytes
                                ? "–"
                                : change(target.target_bytes - target.current_bytes),
                        ),
                        h(
                            "td",
                            {
                                title: target.relative
                                    ? `${times(target.relative.low)} to ${times(target.relative.high)}`
                                    : null,
                            },
                            times(target.relative?.expected),
                        ),
                        h("td", { class: "why", title: margins(target) || null }, REASONS[target.reason] ?? target.reason),
                    ),
                ),
            ),
        ),
        targets.length > SHOWN_MAX &&
            h("p", { class: "hint" }, `and ${targets.length - SHOWN_MAX} more, which change less.`),
    ];
}
