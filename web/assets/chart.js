// What all charts share: scales, ticks, axes, steps, and labels that keep out of each other's way.

import { s } from "./dom.js";
import { bytes, clock, day, GIB, MIB } from "./units.js";

/** Maps `from` to pixels `to`, linearly or by logarithm. */
export function scale(from, to, log = false) {
    const f = log ? Math.log2 : (value) => value;
    const [a, b] = from.map(f);
    const slope = (to[1] - to[0]) / (b - a || 1);
    const map = (value) => to[0] + (f(value) - a) * slope;
    map.invert = (pixel) => {
        const value = a + (pixel - to[0]) / slope;
        return log ? 2 ** value : value;
    };
    map.from = from;
    map.to = to;
    return map;
}

/** At most `most` sizes that are round in powers of two. */
export function sizeTicks(x, most, log) {
    const [low, high] = x.from;
    const ticks = [];
    if (!(high > low && Number.isFinite(high))) return ticks;
    if (log) {
        const first = Math.ceil(Math.log2(low));
        const last = Math.floor(Math.log2(high));
        const every = Math.max(1, Math.ceil((last - first + 1) / most));
        for (let power = first; power <= last; power += every) ticks.push(2 ** power);
        return ticks;
    }
    let step = MIB;
    while ((high - low) / step > most) step *= 2;
    for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
    return ticks;
}

/** At most about `most` round numbers from zero to `high`. */
export function numberTicks(high, most) {
    if (!(high > 0 && Number.isFinite(high))) return [0];
    const rough = high / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
    const ticks = [];
    for (let index = 0; index * step <= high * 1.0001; index += 1) ticks.push(index * step);
    return ticks;
}

const MINUTE = 60_000;
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 10_080].map((minutes) => minutes * MINUTE);

/** At most `most` round moments, in the reader's time zone. */
export function timeTicks([since, until], most) {
    const step = TIME_STEPS.find((candidate) => (until - since) / candidate <= most) ?? TIME_STEPS.at(-1);
    // Of that time: a clock is put forward and back.
    const zone = (at) => new Date(at).getTimezoneOffset() * MINUTE;
    const ticks = [];
    for (let local = Math.ceil((since - zone(since)) / step) * step; ; local += step) {
        const tick = local + zone(local + zone(until));
        if (tick > until) break;
        if (tick >= since && tick > (ticks.at(-1) ?? -Infinity)) ticks.push(tick);
    }
    return { ticks, text: step >= 1440 * MINUTE ? day : clock };
}

/** Axis of sizes below a plot. */
export const sizeAxis = (x, bottom, top, most, log) =>
    axisX(sizeTicks(x, most, log), x, bottom, top, (tick) => (tick === 0 ? "0" : short(tick)));

/** Axis of times below a plot. */
export function timeAxis(x, bottom, top, most) {
    const { ticks, text } = timeTicks(x.from, most);
    return axisX(ticks, x, bottom, top, text);
}

// On an axis, the digits that a tick needs and no more.
function short(value) {
    if (value >= GIB && value % GIB !== 0) return `${+(value / GIB).toFixed(2)} GiB`;
    return bytes(value);
}

function axisX(ticks, x, bottom, top, text) {
    return s(
        "g",
        { class: "axis", "aria-hidden": "true" },
        ticks.map((tick) => [
            s("line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: bottom }),
            s("text", { x: x(tick), y: bottom + 17, "text-anchor": "middle" }, text(tick)),
        ]),
        s("line", { class: "base", x1: x.to[0], x2: x.to[1], y1: bottom, y2: bottom }),
    );
}

/** Axis at the left of a plot. */
export function axisY(ticks, y, left, right, text) {
    return s(
        "g",
        { class: "axis", "aria-hidden": "true" },
        ticks.map((tick) => [
            s("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
            s("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, text(tick)),
        ]),
    );
}

const at = (value) => Math.round(value * 10) / 10;

/** Path of a line that holds each value until the next; `null` leaves a gap. */
export function steps(points, x, y, end = null) {
    let path = "";
    let drawing = false;
    for (const [atX, value] of points) {
        if (value === null || value === undefined) {
            if (drawing) path += `H${at(x(atX))}`;
            drawing = false;
        } else if (drawing) {
            path += `H${at(x(atX))}V${at(y(value))}`;
        } else {
            path += `M${at(x(atX))},${at(y(value))}`;
            drawing = true;
        }
    }
    if (drawing && end !== null) path += `H${at(x(end))}`;
    return path;
}

/** Path of the area between two such lines; `points` are `[x, low, high]`. */
export function stepArea(points, x, y, end) {
    if (!points.length) return "";
    let forth = `M${at(x(points[0][0]))},${at(y(points[0][2]))}`;
    let back = "";
    points.forEach(([atX, low, high], index) => {
        const next = at(x(index + 1 < points.length ? points[index + 1][0] : end));
        forth += `V${at(y(high))}H${next}`;
        back = `V${at(y(low))}H${at(x(atX))}${back}`;
    });
    return `${forth}${back}Z`;
}

/** The step of a curve that holds at a size, or `null` left of the first. */
export function stepAt(points, sizePages) {
    let low = 0;
    let high = points.length;
    while (low < high) {
        const middle = (low + high) >> 1;
        if (points[middle].size_pages <= sizePages) low = middle + 1;
        else high = middle;
    }
    return low ? points[low - 1] : null;
}

/** Gives each label the first row in which it meets no other; sets `row` and `anchor`. */
export function rows(labels, left, right, charPx) {
    const taken = [];
    for (const label of labels.toSorted((a, b) => a.x - b.x)) {
        const width = label.text.length * charPx + 10;
        label.anchor = label.x + width > right ? "end" : "start";
        const [from, to] = label.anchor === "end" ? [label.x - width, label.x] : [label.x, label.x + width];
        let row = taken.findIndex((spans) => spans.every(([a, b]) => to < a || from > b));
        if (row < 0) row = taken.push([]) - 1;
        taken[row].push([from, to]);
        label.row = row;
    }
    return taken.length;
}

// Widths of elements as they were last laid out, by name.
const widths = new Map();
let wider = () => {};
const observer = new ResizeObserver((entries) => {
    let changed = false;
    for (const { target, contentRect } of entries) {
        const width = Math.round(contentRect.width);
        if (width > 0 && widths.get(target.dataset.measure) !== width) {
            widths.set(target.dataset.measure, width);
            changed = true;
        }
    }
    if (changed) wider();
});
const observed = new WeakSet();

/** Width of the element that is called `name`, as of its last layout. */
export const widthOf = (name) => widths.get(name) ?? 640;

/** What to do when a width has changed. */
export const onWidth = (then) => {
    wider = then;
};

/** Measures an element whenever it is laid out; give it as `onpaint` beside `data-measure`. */
export function measure(element) {
    if (observed.has(element)) return;
    observed.add(element);
    observer.observe(element);
}

const WHISKER = { width: 108, height: 16, most: 2 };

/** Relative misses with their band on a scale by logarithm from half to twice, and the bound. */
export function whisker(relative, bound, measured = null) {
    const { width, height, most } = WHISKER;
    const x = scale([1 / most, most], [4, width - 4], true);
    const at = (value) => x(Math.min(most, Math.max(1 / most, value)));
    const broken = bound !== null && (measured ?? relative?.high ?? 0) > bound;
    return s(
        "svg",
        { class: "whisker", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
        s("line", { class: "base", x1: 4, x2: width - 4, y1: 8, y2: 8 }),
        s("line", { class: "one", x1: at(1), x2: at(1), y1: 4, y2: 12 }),
        bound !== null && s("line", { class: "bound", x1: at(bound), x2: at(bound), y1: 1, y2: 15 }),
        relative && [
            s("line", {
                class: `band ${broken ? "broken" : ""}`,
                x1: at(relative.low),
                x2: Math.max(at(relative.high), at(relative.low) + 1),
                y1: 8,
                y2: 8,
            }),
            s("circle", { class: `dot ${broken ? "broken" : ""}`, cx: at(relative.expected), cy: 8, r: 3.5 }),
        ],
        measured !== null &&
            s("path", {
                class: `measured ${broken ? "broken" : ""}`,
                d: `M${at(measured)},2.5l5.5,5.5l-5.5,5.5l-5.5,-5.5z`,
            }),
    );
}
