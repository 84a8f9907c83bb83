// Numbers as people read them. What is not known is a dash, never zero.

import { h } from "./dom.js";

const NOTHING = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export const MIB = 2 ** 20;
export const GIB = 2 ** 30;

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** Three digits and a unit: `1.50 GiB`. */
export function bytes(value) {
    if (!known(value)) return NOTHING;
    let unit = 0;
    let size = Math.abs(value);
    while (size >= 1024 && unit < UNITS.length - 1) {
        size /= 1024;
        unit += 1;
    }
    const digits = unit === 0 || size >= 100 || Number.isInteger(size) ? 0 : size >= 10 ? 1 : 2;
    return `${value < 0 ? "−" : ""}${size.toFixed(digits)} ${UNITS[unit]}`;
}

/** A size that a machine can read too: the exact bytes stand in `value`. */
export function size(value, attributes = {}) {
    if (!known(value)) return h("span", { class: "none", ...attributes }, NOTHING);
    return h("data", { value, title: `${value.toLocaleString("en")} bytes`, ...attributes }, bytes(value));
}

/** A change of size, with its sign. */
export const change = (value) => (value > 0 ? `+${bytes(value)}` : bytes(value));

/** Misses over those at the baseline: `1.08×`. */
export const times = (value) => (known(value) ? `${value.toFixed(2)}×` : NOTHING);

/**
 * What a prediction leaves to each bound, by the upper limit of its band: `0.05× to spare (1.20×, band to 1.24×, limit
 * 1.29×)`. Empty where there is no bound, or nothing predicted.
 */
export function margins({ max_loss, max_misses_per_second: most, relative, misses }) {
    const one = (expected, high, limit, text) => {
        const room = limit - high;
        const left = room < 0 ? `${text(-room)} above` : `${text(room)} to spare`;
        return `${left} (${text(expected)}, band to ${text(high)}, limit ${text(limit)})`;
    };
    return [
        known(max_loss) && relative && one(relative.expected, relative.high, 1 + max_loss, times),
        known(most) && misses && one(misses.misses_per_second, misses.misses_high_per_second, most, rate),
    ]
        .filter(Boolean)
        .join("; ");
}

/** A share as percent, with as many digits as it needs to be told from zero. */
export function percent(value) {
    if (!known(value)) return NOTHING;
    const hundredth = value * 100;
    const digits = hundredth === 0 || Math.abs(hundredth) >= 10 ? 0 : Math.abs(hundredth) >= 0.1 ? 1 : 3;
    return `${hundredth.toFixed(digits)} %`;
}

/** A number per second, with as many digits as it needs to be told from zero. */
export function perSecond(value) {
    if (!known(value)) return NOTHING;
    return value >= 10 || value === 0 ? count(value) : value >= 1 ? value.toFixed(1) : value.toPrecision(2);
}

/** The same with its unit: `12/s`. */
export const rate = (value) => (known(value) ? `${perSecond(value)}/s` : NOTHING);

/** A count with separators. */
export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : NOTHING);

/** A length of time: `340 ms`, `12 s`, `4 min`, `3 h 20 min`, `5 d`. */
export function duration(ms) {
    if (!known(ms)) return NOTHING;
    if (ms < 1000) return `${ms >= 10 || Number.isInteger(ms) ? Math.round(ms) : ms.toFixed(1)} ms`;
    const seconds = ms / 1000;
    if (seconds < 90) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 90) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
    return `${Math.round(hours / 24)} d`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const CLOCK_SECONDS = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const FULL = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long" });

export const clock = (unixMs) => CLOCK.format(unixMs);
export const day = (unixMs) => DAY.format(unixMs);

/** A moment: the time of day, with the date if it is not that of `now`. */
export function moment(unixMs, now) {
    if (!known(unixMs)) return h("span", { class: "none" }, NOTHING);
    const sameDay = day(unixMs) === day(now);
    const text = sameDay ? CLOCK_SECONDS.format(unixMs) : `${day(unixMs)} ${clock(unixMs)}`;
    return h("time", { datetime: new Date(unixMs).toISOString(), title: FULL.format(unixMs) }, text);
}

/** "1 VM", "2 VMs". */
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
