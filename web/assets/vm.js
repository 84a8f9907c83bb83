// One VM: its curve with a size to drag, its memory over time, where it is busy, what it is promised, and how far all
// that can be trusted.

import {
    axisY,
    measure,
    numberTicks,
    rows,
    scale,
    sizeAxis,
    sizeTicks,
    stepArea,
    stepAt,
    steps,
    timeAxis,
    widthOf,
} from "./chart.js";
import { h, s } from "./dom.js";
import { heatPanel } from "./heatmap.js";
import { BOUNDS, workingSet } from "./host.js";
import { accelerator, badge, shape, stopped } from "./status.js";
import { app, askWhatIf, loadVm, nowUnixMs, RANGES, setVm, update } from "./store.js";
import { SOURCES, trustList } from "./trust.js";
import { bytes, count, MIB, margins, moment, percent, perSecond, size, times } from "./units.js";

export function vmView() {
    const { vm } = app;
    if (!vm)
        return h(
            "div",
            { class: "empty" },
            h("h1", {}, "Which VM?"),
            h("p", {}, h("a", { href: "#/host" }, "All VMs of the host")),
        );
    // The list is never older than the VM's own answer, and there at once.
    const summary = app.host.vms.find((candidate) => candidate.vm === vm.name) ?? null;
    if (!summary) {
        return h(
            "div",
            { class: "empty" },
            h("h1", {}, vm.name),
            h("p", { role: "status" }, vm.error ?? "It is not on this host, or no longer."),
            h("p", {}, h("a", { href: "#/host" }, "All VMs of the host")),
        );
    }
    return h(
        "div",
        { class: "view vm-view" },
        h(
            "div",
            { class: "vm-head" },
            h("p", { class: "crumbs" }, h("a", { href: "#/host" }, "Host"), " / VM"),
            h("h1", {}, summary.vm, " ", badge(summary.status), accelerator(summary.accelerator), stopped(summary.stopped)),
            h("p", { class: "why" }, summary.why),
        ),
        numbers(summary),
        curvePanel(vm, summary),
        h("div", { class: "columns" }, timePanel(vm, summary), heatPanel(vm)),
        h(
            "div",
            { class: "columns" },
            h(
                "section",
                { class: "panel", "aria-labelledby": "trust-title" },
                h("div", { class: "panel-head" }, h("h2", { id: "trust-title" }, "How far to trust this")),
                trustList(summary, nowUnixMs()),
            ),
            promisePanel(summary),
        ),
    );
}

function numbers(vm) {
    const term = (id, name, value, more) =>
        h("div", {}, h("dt", {}, name), h("dd", {}, h("b", { id }, value), h("small", {}, more)));
    const { relative } = vm;
    return h(
        "dl",
        { class: "strip wide six" },
        term("n-size", "Size", size(vm.size_bytes), `${bytes(vm.direct_bytes)} own + ${bytes(vm.cache_bytes)} cache`),
        term("n-set", "Working set", workingSet(vm.working_set), vm.working_set ? "by its curve" : "not known yet"),
        term(
            "n-relative",
            "Misses",
            times(relative?.expected),
            relative
                ? `${times(relative.low)} to ${times(relative.high)} of those at the baseline`
                : "of those at the baseline: not known yet",
        ),
        term(
            "n-promise",
            "Promise",
            vm.promise_bytes === null ? size(null) : ["≥ ", size(vm.promise_bytes)],
            [promised(vm), margins({ ...bounds(vm), relative, misses: vm.misses })].filter(Boolean).join(": "),
        ),
        term(
            "n-target",
            "Target",
            size(vm.target_bytes),
            vm.target_bytes === null ? "none decided" : vm.target_bytes === vm.size_bytes ? "reached" : "on its way",
        ),
        term("n-give", "Could give", size(vm.reclaimable_bytes), "within its limit"),
    );
}

const CURVE = { height: 340, left: 58, right: 18, bottom: 40 };
const MARKS = [
    ["baseline", "baseline", (vm) => vm.settings.baseline_bytes],
    ["promise", "limit", (vm) => vm.promise_bytes],
    ["now", "now", (vm) => vm.size_bytes],
    ["target", "target", (vm) => (vm.target_bytes === vm.size_bytes ? null : vm.target_bytes)],
];

function curvePanel(vm, summary) {
    const curve = vm.view?.vm === vm.name ? vm.view.curve : null;
    const kind = (log, text) =>
        h(
            "label",
            {},
            h("input", {
                type: "radio",
                name: "axis",
                checked: vm.log === log,
                onchange: () => {
                    vm.log = log;
                    update();
                },
            }),
            h("span", {}, text),
        );
    return h(
        "section",
        { class: "panel curve-panel", "aria-labelledby": "curve-title" },
        h(
            "div",
            { class: "panel-head" },
            h("h2", { id: "curve-title" }, "Misses at every size"),
            h(
                "p",
                { class: "sum" },
                curve
                    ? [
                          `${count(curve.references)} references, `,
                          `from ${SOURCES[summary.curve_source] ?? "an unknown source"}`,
                          ", ",
                          moment(summary.curve_unix_ms, app.host.now_unix_ms),
                      ]
                    : "",
            ),
            h(
                "fieldset",
                { class: "choice" },
                h("legend", { class: "unseen" }, "Axis of sizes"),
                kind(false, "linear"),
                kind(true, "log"),
            ),
        ),
        h(
            "div",
            { class: "chart", "data-measure": "curve", onpaint: measure, look: { "min-height": `${CURVE.height}px` } },
            curve?.points.length ? curveChart(vm, summary, curve) : noCurve(vm, summary),
        ),
        handleReadout(vm, summary, curve),
    );
}

function noCurve(vm, { trace, cache }) {
    const why = vm.error
        ? vm.error
        : !vm.view
          ? "Asking the daemon …"
          : trace?.error
            ? `${trace.state === "refused" ? "It is not traced" : "Its tracer has failed"}: ${trace.error}.`
            : trace
              ? `It is being traced (${trace.state}, ${count(trace.periods)} periods so far); a curve needs references from its whole window first.`
              : cache
                ? "The cache under its disk has had too few reads yet."
                : "It is not traced: tracing is switched off, or its process cannot be attached to. `plimsoll doctor` shows what is missing.";
    return h("div", { class: "empty small" }, h("p", {}, h("b", {}, vm.view ? "No curve yet." : "")), h("p", {}, why));
}

function ranges(summary, curve) {
    const { settings } = summary;
    const last = curve.points.at(-1).size_pages * curve.page_bytes;
    const most =
        1.04 *
        Math.max(
            summary.ram_bytes,
            settings.max_bytes,
            summary.size_bytes,
            settings.baseline_bytes,
            Math.min(last, 2 * summary.ram_bytes),
        );
    const first = curve.points[0].size_pages * curve.page_bytes;
    // By logarithm, down to half of the smallest size that can come about.
    const least = Math.max(
        first,
        Math.min(settings.min_bytes || Infinity, summary.promise_bytes ?? Infinity, most / 8) / 2,
        curve.page_bytes,
    );
    return { least, most };
}

/** Misses over the baseline's that the chart shows at least and at most. */
const RELATIVE_TOP = [1.6, 5];

/** What a VM's bound is compared with, by size: its misses over the baseline's, if its only bound is on their rise. */
function drawn({ view }, { settings, relative }, curve) {
    const { max_loss, max_misses_per_second: most, max_stall } = settings;
    const known = view.relative_points ?? [];
    if (max_loss !== null && most === null && max_stall === null && known.length > 0) {
        const highest = 1.15 * Math.max(1 + max_loss, relative?.high ?? 0);
        return {
            points: known,
            valueOf: (point) => point.expected,
            lowOf: (point) => point.low,
            highOf: (point) => point.high,
            bound: 1 + max_loss,
            top: Math.min(Math.max(highest, RELATIVE_TOP[0]), RELATIVE_TOP[1]),
            name: "misses over the baseline's",
            text: times,
        };
    }
    const isRated = curve.points.some((point) => point.misses_per_second !== undefined);
    const valueOf = (point) => (isRated ? point.misses_per_second : point.miss_ratio);
    const base = stepAt(curve.points, settings.baseline_bytes / curve.page_bytes);
    return {
        points: curve.points,
        valueOf,
        lowOf: (point) => (isRated ? point.misses_low_per_second : point.low),
        highOf: (point) => (isRated ? point.misses_high_per_second : point.high),
        bound: base && max_loss !== null ? valueOf(base) * (1 + max_loss) : null,
        top: null,
        name: isRated ? "misses a second" : "misses, share of references",
        text: isRated ? perSecond : percent,
    };
}

function curveChart(vm, summary, curve) {
    const width = widthOf("curve");
    const { left, right, bottom, height } = CURVE;
    const { settings } = summary;
    const { least, most } = ranges(summary, curve);
    const x = scale([vm.log ? least : 0, most], [left, width - right], vm.log);
    const { points, valueOf, lowOf, highOf, bound, name, text, ...fixed } = drawn(vm, summary, curve);
    const visible = points
        .map((point) => [Math.max(point.size_pages * curve.page_bytes, x.from[0]), point])
        .filter(([at], index, all) => at <= most && !(index + 1 < all.length && all[index + 1][0] <= x.from[0]));
    const at = (value) => stepAt(points, value / curve.page_bytes);
    // The knee matters, not the first references at the smallest sizes: cut well above the promise.
    const highest = Math.max(...visible.map(([, point]) => highOf(point)), 1e-6) * 1.05;
    const top = fixed.top ?? (text === percent ? Math.min(1, highest) : highest);

    const char = 6.7;
    const marks = MARKS.map(([name, word, of]) => ({ name, value: of(summary), text: `${word} ${bytes(of(summary))}` }))
        .filter(({ value }) => value !== null && value !== undefined && value >= x.from[0] && value <= most)
        .map((label) => ({ ...label, x: x(label.value) }));
    rows(marks, left, width - 4, char);
    const plotTop = 4 * 17 + 8;
    const plotBottom = height - bottom;
    const y = scale([0, top], [plotBottom, plotTop]);
    const handle = vm.handle ?? summary.size_bytes;

    const move = (value) => {
        const unit = unitOf(summary);
        vm.handle = Math.round(
            Math.min(
                Math.max(Math.round(value / unit) * unit, settings.min_bytes, unit),
                Math.max(settings.max_bytes, unit),
            ),
        );
        askWhatIf();
        update();
    };
    return s(
        "svg",
        {
            viewBox: `0 0 ${width} ${height}`,
            height,
            role: "group",
            "aria-label": `Misses of ${summary.vm} at every size`,
            class: "curve",
        },
        sizeAxis(x, plotBottom, plotTop, Math.max(3, Math.floor(width / 110)), vm.log),
        axisY(numberTicks(top, 5), y, left, width - right, text),
        s(
            "text",
            { class: "axis-name", x: width - right, y: height - 5, "text-anchor": "end" },
            "memory, its own and its cache",
        ),
        s("text", { class: "axis-name", x: 4, y: plotTop - 8 }, width > 500 || text === perSecond ? name : "misses"),
        outside(x, settings, plotTop, plotBottom),
        bound !== null &&
            bound <= top &&
            s(
                "g",
                { class: "bound-line" },
                s("line", { x1: left, x2: width - right, y1: y(bound), y2: y(bound) }),
                s(
                    "text",
                    { x: left + 8, y: y(bound) - 6 },
                    width > 600
                        ? `limit: ${times(1 + settings.max_loss)} of the baseline's`
                        : `limit: ≤ ${times(1 + settings.max_loss)}`,
                ),
            ),
        s(
            "clipPath",
            { id: "curve-clip" },
            s("rect", { x: left, y: plotTop, width: width - right - left, height: plotBottom - plotTop }),
        ),
        s(
            "g",
            { "clip-path": "url(#curve-clip)" },
            s("path", {
                class: "curve-band",
                d: stepArea(
                    visible.map(([value, point]) => [value, lowOf(point), highOf(point)]),
                    x,
                    y,
                    most,
                ),
            }),
            s("path", {
                class: "curve-line",
                d: steps(
                    visible.map(([value, point]) => [value, valueOf(point)]),
                    x,
                    y,
                    most,
                ),
            }),
        ),
        marks.map((mark) =>
            s(
                "g",
                { key: mark.name, class: `mark ${mark.name}` },
                s("line", { x1: mark.x, x2: mark.x, y1: mark.row * 17 + 4, y2: plotBottom }),
            ),
        ),
        marks.map((mark) =>
            s(
                "g",
                { key: `${mark.name}-text`, class: `mark ${mark.name}` },
                s(
                    "text",
                    { x: mark.x + (mark.anchor === "end" ? -5 : 5), y: mark.row * 17 + 14, "text-anchor": mark.anchor },
                    mark.text,
                ),
            ),
        ),
        dragHandle(handle, at(handle), { x, y, valueOf, plotTop, plotBottom, vm, summary, move }),
    );
}

/** Steps of the handle: fine enough for the VM, and never finer than what is moved. */
function unitOf(summary) {
    let unit = 4 * MIB;
    while (summary.settings.max_bytes / unit > 512) unit *= 2;
    return unit;
}

function outside(x, { min_bytes, max_bytes }, top, bottom) {
    const shade = (from, to) =>
        to > from && s("rect", { class: "outside", x: from, y: top, width: to - from, height: bottom - top });
    const clamp = (value) => Math.min(Math.max(x(Math.max(value, 1)), x.to[0]), x.to[1]);
    return [shade(x.to[0], clamp(min_bytes)), shade(clamp(max_bytes), x.to[1])];
}

const KEYS = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };

function dragHandle(value, point, { x, y, valueOf, plotTop, plotBottom, vm, summary, move }) {
    const { settings } = summary;
    const cx = Math.min(Math.max(x(Math.max(value, 1)), x.to[0]), x.to[1]);
    const cy = point ? y(Math.min(valueOf(point), y.from[1])) : plotBottom;
    const toValue = (event) => {
        const svg = event.currentTarget.ownerSVGElement;
        const box = svg.getBoundingClientRect();
        return x.invert(((event.clientX - box.left) * svg.viewBox.baseVal.width) / box.width);
    };
    return s(
        "g",
        {
            class: "handle",
            id: "handle",
            role: "slider",
            tabindex: 0,
            "aria-label": "Size to try",
            "aria-orientation": "horizontal",
            "aria-valuemin": settings.min_bytes,
            "aria-valuemax": settings.max_bytes,
            "aria-valuenow": Math.round(value),
            "aria-valuetext": `${bytes(value)}${vm.whatif?.relative_then ? `, misses ${times(vm.whatif.relative_then.expected)} of those at the baseline` : ""}`,
            onkeydown: (event) => {
                const unit = unitOf(summary);
                const by = KEYS[event.key] && KEYS[event.key] * (event.shiftKey ? 10 : 1);
                if (by) move((vm.handle ?? value) + by * unit);
                else if (event.key === "Home") move(settings.min_bytes);
                else if (event.key === "End") move(settings.max_bytes);
                else if (event.key === "Escape") Object.assign(vm, { handle: null, whatif: null, whatifError: null });
                else return;
                event.preventDefault();
                update();
            },
            onpointerdown: (event) => {
                event.currentTarget.setPointerCapture(event.pointerId);
                event.currentTarget.focus({ preventScroll: true });
                event.preventDefault();
            },
            onpointermove: (event) => event.currentTarget.hasPointerCapture(event.pointerId) && move(toValue(event)),
        },
        s("rect", { class: "grip", x: cx - 14, y: plotTop, width: 28, height: plotBottom - plotTop }),
        s("line", { x1: cx, x2: cx, y1: plotTop, y2: plotBottom }),
        s("circle", { class: "halo", cx, cy, r: 14 }),
        s("circle", { class: "knob", cx, cy, r: 8 }),
        s("path", { class: "arrows", d: `M${cx - 13},${cy - 4}l-4,4l4,4M${cx + 13},${cy - 4}l4,4l-4,4` }),
    );
}

function handleReadout(vm, summary, curve) {
    if (!curve?.points.length) return null;
    const back = () => {
        Object.assign(vm, { handle: null, whatif: null, whatifError: null });
        update();
    };
    if (vm.handle === null)
        return h(
            "p",
            { class: "readout", role: "status" },
            shape("unknown"),
            h(
                "span",
                {},
                "Drag the handle, or move it with the arrow keys, to try another size. This changes nothing.",
            ),
        );
    const { whatif, whatifError } = vm;
    const point = stepAt(curve.points, vm.handle / curve.page_bytes);
    const then = whatif?.relative_then;
    const old = whatif?.size_then_bytes !== vm.handle && !whatifError;
    return h(
        "p",
        { class: `readout ${old ? "old" : ""}`, role: "status", "aria-busy": String(old) },
        shape(whatif?.status_then ?? "unknown"),
        h(
            "span",
            {},
            "At ",
            h("b", {}, size(vm.handle, { id: "handle-size" })),
            ` (${vm.handle >= summary.size_bytes ? "+" : ""}${bytes(vm.handle - summary.size_bytes)}): `,
            whatifError
                ? whatifError
                : [
                      whatif?.misses_then ? ["misses ", h("b", {}, perSecond(whatif.misses_then.misses_per_second)), " a second; "] : "",
                      "misses ",
                      h("b", { id: "handle-relative" }, times(then?.expected)),
                      " of those at the baseline",
                      then ? ` (${times(then.low)} to ${times(then.high)})` : "",
                      point ? `, ${percent(shownRatio(point))} of references` : "",
                      whatif ? `. ${[whatif.why, spared(summary, whatif)].filter(Boolean).join("; ")}` : "",
                  ],
        ),
        h("button", { class: "plain small", onclick: back }, "Back to now"),
    );
}

/** The ratio at a point of a curve: 0 where there are surely no misses a second, as tables show it. */
const shownRatio = (point) => (point.misses_high_per_second === 0 ? 0 : point.miss_ratio);

/** What the size tried out would leave to the bounds. */
const spared = (summary, { relative_then: relative, misses_then: misses }) =>
    margins({ ...bounds(summary), relative, misses });

const TIME = { height: 250, left: 58, right: 12, bottom: 34, top: 14 };

function timePanel(vm, summary) {
    const range = (name) =>
        h(
            "label",
            {},
            h("input", {
                type: "radio",
                name: "range",
                checked: vm.range === name,
                onchange: () => {
                    vm.range = name;
                    vm.history = null;
                    loadVm();
                    update();
                },
            }),
            h("span", {}, name),
        );
    const samples = vm.history?.samples ?? [];
    return h(
        "section",
        { class: "panel", "aria-labelledby": "time-title" },
        h(
            "div",
            { class: "panel-head" },
            h("h2", { id: "time-title" }, "Memory over time"),
            h(
                "fieldset",
                { class: "choice" },
                h("legend", { class: "unseen" }, "How far back"),
                Object.keys(RANGES).map(range),
            ),
        ),
        h(
            "ul",
            { class: "key" },
            h("li", {}, h("i", { class: "swatch direct" }), "own"),
            h("li", {}, h("i", { class: "swatch cache" }), "cache"),
            h("li", {}, h("i", { class: "line set" }), "working set"),
            h("li", {}, h("i", { class: "line target" }), "target"),
        ),
        h(
            "div",
            { class: "chart", "data-measure": "time", onpaint: measure, look: { "min-height": `${TIME.height}px` } },
            samples.length
                ? timeChart(vm, samples)
                : h(
                      "div",
                      { class: "empty small" },
                      h("p", {}, vm.historyError ?? (vm.history ? "No history in this time." : "Asking the daemon …")),
                  ),
        ),
        timeReadout(vm, samples, summary),
    );
}

const GAP_FACTOR = 4;

/** Intervals before and after one by which it is judged: older samples are further apart. */
const GAP_NEIGHBOURS = 3;

/** The samples with a gap wherever nothing was recorded for much longer than usual there. */
function withGaps(samples) {
    const between = samples.slice(1).map((sample, index) => sample.unix_ms - samples[index].unix_ms);
    const points = [];
    samples.forEach((sample, index) => {
        const near = between
            .slice(Math.max(0, index - 1 - GAP_NEIGHBOURS), index + GAP_NEIGHBOURS)
            .toSorted((a, b) => a - b);
        const usual = near[near.length >> 1] ?? Infinity;
        if (index && sample.unix_ms - samples[index - 1].unix_ms > GAP_FACTOR * usual)
            points.push({ unix_ms: samples[index - 1].unix_ms + usual, gap: true });
        points.push(sample);
    });
    return points;
}

function timeChart(vm, samples) {
    const width = widthOf("time");
    const { height, left, right, bottom, top } = TIME;
    const until = Math.max(nowUnixMs(), samples.at(-1).unix_ms);
    const since = until - RANGES[vm.range] * 3_600_000;
    const x = scale([since, until], [left, width - right]);
    const most = Math.max(
        ...samples.map((sample) =>
            Math.max(sample.direct_bytes + sample.cache_bytes, sample.target_bytes ?? 0, sample.working_set_bytes ?? 0),
        ),
        1,
    );
    const y = scale([0, most * 1.06], [height - bottom, top]);
    const points = withGaps(samples.filter((sample) => sample.unix_ms >= since));
    const of = (value) => points.map((sample) => [sample.unix_ms, sample.gap ? null : value(sample)]);
    const floor = height - bottom;
    // A filled step line: each stretch between gaps is closed down to the axis.
    const area = (value) =>
        steps(of(value), x, y, samples.at(-1).unix_ms)
            .split("M")
            .filter(Boolean)
            .map((stretch) => `M${stretch}V${floor}H${stretch.split(",")[0]}Z`)
            .join("");
    const end = samples.at(-1).unix_ms;
    const pointed = vm.point === null ? null : samples[vm.point];
    const nearest = (event) => {
        const svg = event.currentTarget;
        const box = svg.getBoundingClientRect();
        const time = x.invert(((event.clientX - box.left) * width) / box.width);
        vm.point = samples.reduce(
            (best, sample, index) =>
                Math.abs(sample.unix_ms - time) < Math.abs(samples[best].unix_ms - time) ? index : best,
            0,
        );
        update();
    };
    const go = (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!by) return;
        event.preventDefault();
        vm.point = Math.min(samples.length - 1, Math.max(0, (vm.point ?? samples.length - 1 - by) + by));
        update();
    };
    const last = samples.at(-1);
    return s(
        "svg",
        {
            viewBox: `0 0 ${width} ${height}`,
            height,
            class: "time",
            role: "application",
            "aria-roledescription": "chart",
            tabindex: 0,
            "aria-label": `Size, working set and target over ${vm.range}. Last: size ${bytes(last.direct_bytes + last.cache_bytes)}, working set ${usedAt(last)}. Arrow keys step through the samples`,
            onpointermove: nearest,
            onpointerleave: () => {
                vm.point = null;
                update();
            },
            onkeydown: go,
            onblur: () => {
                vm.point = null;
                update();
            },
        },
        s("path", { class: "area cache", d: area((sample) => sample.direct_bytes + sample.cache_bytes) }),
        s("path", { class: "area direct", d: area((sample) => sample.direct_bytes) }),
        axisY(sizeTicks(y, 5, false), y, left, width - right, (tick) => (tick ? bytes(tick) : "0")),
        timeAxis(x, height - bottom, top, Math.max(2, Math.floor(width / 100))),
        s("path", {
            class: "target",
            d: steps(
                of((sample) => sample.target_bytes),
                x,
                y,
                end,
            ),
        }),
        s("path", {
            class: "set",
            d: steps(
                of((sample) => sample.working_set_bytes),
                x,
                y,
                end,
            ),
        }),
        pointed &&
            pointed.unix_ms >= since &&
            s("line", { class: "cursor", x1: x(pointed.unix_ms), x2: x(pointed.unix_ms), y1: top, y2: floor }),
    );
}

/** The working set of a sample, with the sign of a bound. */
const usedAt = (sample) => `${BOUNDS[sample.working_set_bound] ?? ""}${bytes(sample.working_set_bytes)}`;

function timeReadout(vm, samples) {
    const sample = vm.point === null ? null : samples[vm.point];
    return h(
        "p",
        { class: "readout small" },
        h(
            "span",
            {},
            sample
                ? [
                      h("b", {}, moment(sample.unix_ms, samples.at(-1).unix_ms)),
                      `: ${bytes(sample.direct_bytes)} own, ${bytes(sample.cache_bytes)} cache, working set ${usedAt(sample)}, target ${bytes(sample.target_bytes)}, misses ${times(sample.relative)}`,
                      sample.misses_per_second === null ? "" : `, ${perSecond(sample.misses_per_second)} misses/s`,
                      sample.lost ? `, ${count(sample.lost)} references lost` : "",
                  ]
                : "Point at a time to read its values.",
        ),
    );
}

const number = (name, text, value, attributes, hint) =>
    h(
        "label",
        {},
        h("span", {}, text),
        h("input", { type: "number", name, value, required: true, ...attributes }),
        h("small", {}, hint),
    );

const COSTS = {
    "disk-daemon": "as its disk daemon measures",
    "block-statistics": "as QEMU's block statistics measure",
    assumed: "assumed, not measured",
};

/** A VM's bounds, with that on waiting as a number of misses. */
function bounds({ settings, miss_cost, vcpu_seconds_per_second: vcpus }) {
    const { max_loss, max_misses_per_second: most, max_stall } = settings;
    const waiting = max_stall === null || !vcpus ? Infinity : (max_stall * vcpus * 1000) / miss_cost.ms;
    const misses = Math.min(most ?? Infinity, waiting);
    return { max_loss, max_misses_per_second: Number.isFinite(misses) ? misses : null };
}

/** What a VM is promised about its misses. */
function promised({ settings, miss_cost }) {
    const { max_loss, max_misses_per_second, max_stall, baseline_bytes } = settings;
    return [
        max_loss !== null && `misses at most ${times(1 + max_loss)} of those at ${bytes(baseline_bytes)}`,
        max_misses_per_second !== null && `at most ${max_misses_per_second} misses a second`,
        max_stall !== null &&
            `at most ${Math.round(max_stall * 10_000) / 100} % of its vCPU time waiting for misses of ${Math.round(miss_cost.ms * 1000) / 1000} ms (${COSTS[miss_cost.source] ?? miss_cost.source})`,
    ]
        .filter(Boolean)
        .join(", ");
}

/** Sizes are whole pages. */
const PAGE_BYTES = 4096;
/** What a field's number says to the daemon. */
const mibToBytes = (mib) => Math.round((mib * MIB) / PAGE_BYTES) * PAGE_BYTES;
const SETTINGS = {
    min_bytes: mibToBytes,
    max_bytes: mibToBytes,
    baseline_bytes: mibToBytes,
    shares: (shares) => shares,
    max_loss: (points) => points / 100,
    max_misses_per_second: (misses) => misses,
    max_stall: (points) => points / 100,
};
/** What a VM is promised is one setting: those of its bounds that are empty do not hold. */
const PROMISE = ["max_loss", "max_misses_per_second", "max_stall"];

function promisePanel({ vm, settings, ram_bytes }) {
    const mib = (value) => Math.round((value / MIB) * 100) / 100;
    const points = (share) => (share === null ? "" : Math.round(share * 10_000) / 100);
    const submit = async (event) => {
        event.preventDefault();
        const form = event.target;
        const changes = {};
        for (const { name, type, value, defaultValue, checked, defaultChecked } of form.elements) {
            if (type === "checkbox" && checked !== defaultChecked) changes[name] = checked;
            if (type === "number" && value !== defaultValue && !PROMISE.includes(name))
                changes[name] = SETTINGS[name](Number(value));
        }
        const bounds = PROMISE.map((name) => form.elements[name]);
        const isOther = bounds.some(({ value, defaultValue }) => value !== defaultValue);
        if (isOther && bounds.every(({ value }) => value === "")) {
            app.notice = { text: "Nothing was changed: a VM has at least one of the three limits on misses.", bad: true };
            update();
            return;
        }
        if (isOther)
            for (const { name, value } of bounds) if (value !== "") changes[name] = SETTINGS[name](Number(value));
        if (!Object.keys(changes).length) return;
        // From now on the fields follow the daemon again.
        if (await setVm(vm, changes)) form.reset();
    };
    const sizes = { min: 0, step: "any" };
    return h(
        "section",
        { class: "panel", "aria-labelledby": "promise-title" },
        h("div", { class: "panel-head" }, h("h2", { id: "promise-title" }, "Limits")),
        h(
            "form",
            { class: "promise", onsubmit: submit },
            number("min_bytes", "Never less than, MiB", mib(settings.min_bytes), sizes, ""),
            number(
                "max_bytes",
                "Never more than, MiB",
                mib(settings.max_bytes),
                sizes,
                `started with ${bytes(ram_bytes)}`,
            ),
            number("baseline_bytes", "Baseline, MiB", mib(settings.baseline_bytes), sizes, "misses are measured by it"),
            number(
                "max_loss",
                "Most rise of misses, %",
                points(settings.max_loss),
                { min: 0, step: "any", required: false },
                "over those at the baseline",
            ),
            number(
                "max_misses_per_second",
                "Most misses a second",
                settings.max_misses_per_second ?? "",
                { min: 0, step: "any", required: false },
                "empty: no such promise",
            ),
            number(
                "max_stall",
                "Most waiting for misses, %",
                points(settings.max_stall),
                { min: 0, max: 100, step: "any", required: false },
                "of its vCPU time",
            ),
            number("shares", "Shares", settings.shares, { min: 1, step: 1 }, "its right beside the others'"),
            h(
                "label",
                { class: "check" },
                h("input", { type: "checkbox", name: "managed", checked: settings.managed }),
                h("span", {}, "The daemon may move it"),
            ),
            h(
                "p",
                { class: "buttons" },
                h(
                    "button",
                    {
                        class: "plain",
                        type: "button",
                        onclick: () => {
                            app.question = {
                                title: `Discard the settings made by hand for ${vm}?`,
                                text: "Its limits return to those of the configuration.",
                                verb: "Forget it",
                                run: () => setVm(vm, { reset: true }),
                            };
                            update();
                        },
                    },
                    "Back to the configuration",
                ),
                h("button", { class: "strong" }, "Set"),
            ),
        ),
    );
}
