// Ticks of time where clocks are put forward and back.

import assert from "node:assert/strict";
import { test } from "node:test";

process.env.TZ = "Europe/Berlin";
// What browsers have.
globalThis.ResizeObserver = class {};
const { timeTicks } = await import("../assets/chart.js");

const HOUR = 3_600_000;
const local = (time) => {
    const at = new Date(time);
    return `${at.getDate()}. ${String(at.getHours()).padStart(2, "0")}:${String(at.getMinutes()).padStart(2, "0")}`;
};
const ticks = (since, hours, most) => {
    const from = Date.parse(since);
    const { ticks } = timeTicks([from, from + hours * HOUR], most);
    assert.deepEqual(ticks, [...new Set(ticks)].sort((a, b) => a - b));
    return ticks.map(local);
};

test("days begin at midnight on both sides of a change", () => {
    assert.deepEqual(ticks("2026-10-23T06:00+02:00", 96, 6), ["24. 00:00", "25. 00:00", "26. 00:00", "27. 00:00"]);
    assert.deepEqual(ticks("2026-03-27T12:00+01:00", 72, 4), ["28. 00:00", "29. 00:00", "30. 00:00"]);
});

test("an hour that is left out has no tick, and one that comes twice has one", () => {
    assert.deepEqual(ticks("2026-03-29T00:00+01:00", 4, 6), ["29. 00:00", "29. 01:00", "29. 03:00", "29. 04:00", "29. 05:00"]);
    assert.deepEqual(ticks("2026-10-25T00:00+02:00", 5, 6), ["25. 00:00", "25. 01:00", "25. 02:00", "25. 03:00", "25. 04:00"]);
});

test("steps of minutes are round in the reader's time zone", () => {
    assert.deepEqual(ticks("2026-11-27T08:01Z", 0.5, 4), ["27. 09:10", "27. 09:20", "27. 09:30"]);
});
