// How far the numbers can be trusted, and what they cost: overhead, losses, ages, the daemon itself.

import { h } from "./dom.js";
import { mark } from "./status.js";
import { app } from "./store.js";
import { count, duration, percent, size } from "./units.js";

/** Guests' statistics older than this are not believed without a word. */
const STATISTICS_STALE_MS = 60_000;
/** So are curves that many turns old. */
const CURVE_STALE_TURNS = 20;
const OVERHEAD_HIGH = 0.02;

export const SOURCES = {
    trap: "traps on its RAM",
    scan: "accessed-page scans of its RAM",
    "first-touch": "first touches of random pages of its RAM",
    "page-cache": "uses of its page cache",
    disk: "the cache under its disk and the ghost list behind it",
};
const observed = (trace) =>
    ["trap", "first-touch"].includes(trace.method)
        ? `${count(trace.traps_per_second)} traps/s`
        : `${count(trace.touches_per_second)} touches/s`;
const none = (why) => h("span", { class: "none" }, why);
const flag = (bad, content, why) => (bad ? [content, " ", mark("tight", why)] : content);

function facts(vm, now) {
    const { balloon, cache } = vm;
    const refused = vm.trace?.state === "refused" ? vm.trace.error : null;
    const trace = refused ? null : vm.trace;
    const curveAge = vm.curve_unix_ms === null ? null : Math.max(0, now - vm.curve_unix_ms);
    const statisticsAge = balloon?.statistics_age_ms ?? null;
    return {
        overhead: trace
            ? flag(trace.overhead_ratio > OVERHEAD_HIGH, percent(trace.overhead_ratio), "high")
            : none("not traced"),
        lost: trace ? flag(trace.lost > 0, count(trace.lost), "lost") : none("not traced"),
        lostLines: trace ? flag(trace.lost_lines > 0, count(trace.lost_lines), "lost") : none("not traced"),
        restarts: trace ? flag(trace.restarts > 0, count(trace.restarts), "restarted") : none("not traced"),
        tracer: trace
            ? flag(trace.state === "failed", trace.error ? `${trace.state}: ${trace.error}` : trace.state, "failed")
            : none(refused ?? "not traced"),
        curve:
            curveAge === null
                ? none("no curve")
                : flag(curveAge > CURVE_STALE_TURNS * app.host.turn_interval_ms, duration(curveAge), "old"),
        references: count(vm.references),
        source: SOURCES[vm.curve_source] ?? none("no curve"),
        sampling: trace
            ? `1 page in ${count(trace.tracking_rate > 0 ? 1 / trace.tracking_rate : null)}, ${count(trace.tracked_pages)} watched, ${observed(trace)}, ${count(trace.periods)} periods`
            : none("not traced"),
        statistics: !balloon
            ? none("no balloon")
            : statisticsAge === null
              ? flag(true, "none given", "unknown")
              : flag(statisticsAge > STATISTICS_STALE_MS, duration(statisticsAge), "stale"),
        balloon: balloon
            ? flag(["late", "stuck", "absent"].includes(balloon.state), balloon.state, "not following")
            : none("none that can be reached"),
        claims: flag(vm.refused_claims > 0, count(vm.refused_claims), "not believed"),
        stall: vm.memory_stall_ratio === undefined ? none("not reported") : percent(vm.memory_stall_ratio),
        cache: !cache
            ? none("none")
            : cache.disabled
              ? flag(true, `off: ${cache.disabled}`, "off")
              : [
                    size(cache.used_bytes),
                    " of ",
                    size(cache.capacity_bytes),
                    `, ${cache.read_blocks > 0 ? percent(cache.hits / cache.read_blocks) : "–"} of reads`,
                ],
    };
}

/** All that bears on trust in one VM's numbers. */
export function trustList(vm, now) {
    const fact = facts(vm, now);
    const rows = [
        ["overhead", "Overhead", "Share of its CPU time taken by its tracer"],
        ["lost", "References lost", "that may be missing from the curve"],
        ["lostLines", "Reports lost", "lines of its tracer that could not be read"],
        ["restarts", "Tracer restarts", ""],
        ["tracer", "Tracer", ""],
        ["curve", "Age of the curve", ""],
        ["references", "References behind it", ""],
        ["source", "Where it comes from", ""],
        ["sampling", "Sampling", ""],
        ["statistics", "Age of the guest's statistics", "reported by the guest, and not verified"],
        ["balloon", "Balloon", ""],
        ["claims", "Sizes refused", "reported by it or by its disk daemon, and impossible by what the kernel says"],
        ["stall", "Waiting for memory of the host", "Share of the time, by its control group's pressure"],
        ["cache", "Cache under its disk", ""],
    ];
    return h(
        "dl",
        { class: "facts" },
        rows.map(([name, text, hint]) =>
            h(
                "div",
                { key: name },
                h("dt", { title: hint || null }, text),
                h("dd", { id: `fact-${name}` }, fact[name]),
            ),
        ),
    );
}

export function trustView() {
    const { host } = app;
    const now = host.now_unix_ms;
    const columns = [
        ["tracer", "Tracer"],
        ["overhead", "Overhead"],
        ["lost", "Lost"],
        ["restarts", "Restarts"],
        ["curve", "Curve's age"],
        ["references", "References"],
        ["statistics", "Guest's statistics"],
        ["balloon", "Balloon"],
    ];
    const term = (id, name, value, more) =>
        h("div", {}, h("dt", {}, name), h("dd", {}, h("b", { id }, value), h("small", {}, more)));
    const per = host.vms.length ? host.daemon_resident_bytes / host.vms.length : null;
    return h(
        "div",
        { class: "view" },
        h(
            "div",
            { class: "view-head" },
            h("h1", {}, "Trust"),
            h("p", {}, "Cost of the data, possible losses, and age."),
        ),
        h(
            "dl",
            { class: "strip wide" },
            term(
                "t-memory",
                "Daemon's memory",
                size(host.daemon_resident_bytes),
                per === null ? "resident" : ["resident, ", size(per), " a VM"],
            ),
            term("t-turn", "Last turn", duration(host.turn_took_ms), `of ${duration(host.turn_interval_ms)}`),
            term(
                "t-history",
                "History on disk",
                size(host.history_bytes),
                host.history_bytes === null ? "none is kept" : "bounded by the configuration",
            ),
            term(
                "t-since",
                "Running for",
                duration(now - host.since_unix_ms),
                `${count(host.turn)} turns, version ${host.version}`,
            ),
            term(
                "t-lost",
                "References lost",
                count(host.vms.reduce((sum, vm) => sum + (vm.trace?.lost ?? 0), 0)),
                "by all tracers together",
            ),
        ),
        h(
            "section",
            { class: "panel", "aria-labelledby": "trust-vms" },
            h("div", { class: "panel-head" }, h("h2", { id: "trust-vms" }, "Each VM")),
            host.vms.length === 0
                ? h("div", { class: "empty small" }, h("p", {}, "No VMs, so no data yet."))
                : h(
                      "div",
                      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of all VMs" },
                      h(
                          "table",
                          { class: "trust" },
                          h(
                              "thead",
                              {},
                              h(
                                  "tr",
                                  {},
                                  h("th", { scope: "col" }, "VM"),
                                  columns.map(([, text]) => h("th", { scope: "col" }, text)),
                              ),
                          ),
                          h(
                              "tbody",
                              {},
                              host.vms.map((vm) => {
                                  const fact = facts(vm, now);
                                  return h(
                                      "tr",
                                      { key: vm.vm, "data-vm": vm.vm },
                                      h(
                                          "th",
                                          { scope: "row" },
                                          h("a", { href: `#/vm/${encodeURIComponent(vm.vm)}` }, vm.vm),
                                      ),
                                      columns.map(([name]) => h("td", { class: `f-${name}` }, fact[name])),
                                  );
                              }),
                          ),
                      ),
                  ),
        ),
    );
}
