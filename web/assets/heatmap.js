// Where in its RAM a VM is busy: time from left to right, addresses upward, the deeper the more of a cell's pages are used.

import { measure, timeTicks, widthOf } from "./chart.js";
import { h } from "./dom.js";
import { app, update } from "./store.js";
import { theme } from "./themes.js";
import { bytes, count, moment, percent } from "./units.js";

const HEIGHT = 232;
const LEFT = 58;
const BOTTOM = 34;
const TOP = 6;
const CELLS_MAX = 4096;
const ROWS_MAX = 4096;

const RAMPS = {
    light: [
        [246, 249, 251],
        [186, 219, 226],
        [88, 168, 190],
        [24, 104, 148],
        [13, 43, 84],
    ],
    dark: [
        [20, 31, 43],
        [22, 71, 99],
        [26, 128, 150],
        [110, 196, 160],
        [250, 238, 150],
    ],
};

/** The colour of a share, 0.0 to 1.0. */
function color(ramp, share) {
    const place = Math.min(Math.max(share, 0), 1) * (ramp.length - 1);
    const index = Math.min(Math.floor(place), ramp.length - 2);
    return ramp[index].map((from, channel) => Math.round(from + (ramp[index + 1][channel] - from) * (place - index)));
}

const rampNow = () => RAMPS[theme()];

function shapeOf({ rows, cell_bytes }) {
    const kept = rows.slice(-ROWS_MAX);
    const cells = Math.min(Math.max(0, ...kept.map((row) => row.pages.length)), CELLS_MAX);
    return { rows: kept, cells, pages: Math.max(1, cell_bytes / 4096) };
}

export function heatPanel(vm) {
    const { heat } = vm;
    const there = heat?.rows.length > 0;
    return h(
        "section",
        { class: "panel", "aria-labelledby": "heat-title" },
        h(
            "div",
            { class: "panel-head" },
            h("h2", { id: "heat-title" }, "RAM activity"),
            there && h("p", { class: "sum" }, `a cell is ${bytes(heat.cell_bytes)} of its RAM in one period`),
        ),
        h(
            "div",
            { class: "key heat-key" },
            there && [
                h("span", {}, "0 %"),
                h("canvas", { class: "ramp", width: 128, height: 10, "aria-hidden": "true", onpaint: paintRamp }),
                h("span", {}, "100 % of the cell's pages used"),
            ],
        ),
        h(
            "div",
            { class: "chart", "data-measure": "heat", onpaint: measure, look: { "min-height": `${HEIGHT + 18}px` } },
            there
                ? canvas(vm)
                : h(
                      "div",
                      { class: "empty small" },
                      h("p", {}, vm.heatError ?? (heat ? "No page was seen in use." : "Asking the daemon …")),
                  ),
        ),
        h("p", { class: "readout small" }, h("span", { "aria-live": "polite" }, there ? describe(vm) : "")),
    );
}

function describe({ heat, cell }) {
    if (!cell) return "Point at a cell to read it.";
    const { rows, pages } = shapeOf(heat);
    const row = rows[cell.row];
    const used = row?.pages[cell.cell];
    if (used === undefined) return "Point at a cell to read it.";
    return [
        h("b", {}, moment(row.unix_ms, rows.at(-1).unix_ms)),
        `, ${bytes(cell.cell * heat.cell_bytes)} to ${bytes((cell.cell + 1) * heat.cell_bytes)}: about ${count(used)} pages used, ${percent(Math.min(1, used / pages))}`,
    ];
}

function canvas(vm) {
    const { rows, cells } = shapeOf(vm.heat);
    const to = (cell) => {
        vm.cell = cell;
        update();
    };
    const point = (event) => {
        const box = event.currentTarget.getBoundingClientRect();
        const across = (event.clientX - box.left - LEFT) / (box.width - LEFT);
        const up = (HEIGHT - BOTTOM - (event.clientY - box.top)) / (HEIGHT - BOTTOM - TOP);
        const inside = across >= 0 && across < 1 && up >= 0 && up < 1;
        to(inside ? { row: Math.floor(across * rows.length), cell: Math.floor(up * cells) } : null);
    };
    const go = (event) => {
        const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
        if (!by) return;
        event.preventDefault();
        const from = vm.cell ?? { row: rows.length - 1, cell: 0 };
        const clamp = (value, count) => Math.min(Math.max(value, 0), count - 1);
        to({ row: clamp(from.row + by[0], rows.length), cell: clamp(from.cell + by[1], cells) });
    };
    const dense = devicePixelRatio || 1;
    return h("canvas", {
        width: Math.round(widthOf("heat") * dense),
        height: Math.round(HEIGHT * dense),
        class: "heat",
        id: "heat",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "heatmap",
        "aria-label": `Use of ${cells} parts of the RAM in ${rows.length} periods. Arrow keys move between cells`,
        look: { height: `${HEIGHT}px` },
        onpaint: (element) => paint(element, vm),
        onpointermove: point,
        onpointerleave: () => to(null),
        onkeydown: go,
        onblur: () => to(null),
    });
}

function paint(element, vm) {
    if (app.vm !== vm || !vm.heat) return;
    const width = widthOf("heat");
    const dense = devicePixelRatio || 1;
    const style = getComputedStyle(element);
    // Drawn anew only when something has changed.
    const key = [
        width,
        dense,
        theme(),
        vm.heat.rows.at(-1)?.unix_ms,
        vm.heat.rows.length,
        vm.cell?.row,
        vm.cell?.cell,
    ].join();
    if (element.painted === key) return;
    element.painted = key;
    const context = element.getContext("2d");
    context.setTransform(dense, 0, 0, dense, 0, 0);
    context.clearRect(0, 0, width, HEIGHT);
    const { rows, cells, pages } = shapeOf(vm.heat);
    const ramp = rampNow();
    const image = new ImageData(rows.length, Math.max(cells, 1));
    rows.forEach((row, x) => {
        for (let cell = 0; cell < cells; cell += 1) {
            image.data.set(
                [...color(ramp, Math.sqrt((row.pages[cell] ?? 0) / pages)), 255],
                4 * ((cells - 1 - cell) * rows.length + x),
            );
        }
    });
    const small = new OffscreenCanvas(rows.length, Math.max(cells, 1));
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    const plot = { width: width - LEFT, height: HEIGHT - BOTTOM - TOP };
    context.drawImage(small, LEFT, TOP, plot.width, plot.height);

    context.fillStyle = style.color;
    context.font = `12px ${style.fontFamily}`;
    context.textAlign = "right";
    const whole = cells * vm.heat.cell_bytes;
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
        context.fillText(
            part ? bytes(whole * part) : "0",
            LEFT - 8,
            TOP + plot.height * (1 - part) + (part === 1 ? 10 : 4),
        );
    }
    const since = rows[0].unix_ms;
    const until = rows.at(-1).unix_ms;
    const { ticks, text } = timeTicks([since, Math.max(until, since + 1)], Math.max(2, Math.floor(width / 100)));
    context.textAlign = "center";
    for (const tick of ticks) {
        const x = LEFT + (plot.width * (tick - since)) / Math.max(1, until - since);
        if (x > LEFT + 16 && x < width - 16) context.fillText(text(tick), x, HEIGHT - BOTTOM + 17);
    }
    if (vm.cell) {
        context.strokeStyle = style.caretColor;
        context.lineWidth = 2;
        const [wide, tall] = [plot.width / rows.length, plot.height / Math.max(cells, 1)];
        context.strokeRect(
            LEFT + vm.cell.row * wide,
            TOP + plot.height - (vm.cell.cell + 1) * tall,
            Math.max(wide, 3),
            Math.max(tall, 3),
        );
    }
}

function paintRamp(element) {
    const context = element.getContext("2d");
    const ramp = rampNow();
    for (let x = 0; x < element.width; x += 1) {
        context.fillStyle = `rgb(${color(ramp, Math.sqrt(x / (element.width - 1)))})`;
        context.fillRect(x, 0, 1, element.height);
    }
}
