// What was decided, why, and what came of it: predicted beside measured.

import { whisker } from "./chart.js";
import { h } from "./dom.js";
import { shape, state, verdict } from "./status.js";
import { app, apply, loadDecisions, rollback, update } from "./store.js";
import { bytes, change, duration, margins, moment, percent, plural, rate, size, times } from "./units.js";

const KINDS = {
    divide: "Reallocate memory",
    "into-caches": "Memory into the disk caches",
    "give-back": "Return memory to VMs",
    rollback: "Take back",
};

const total = (holding) => holding.direct_bytes + holding.cache_bytes;

/** How much memory changes hands: what grows or what shrinks, whichever is more; the rest comes from or goes to spare. */
function movedBytes({ steps }) {
    const deltas = steps.flatMap(({ from, to }) => [
        to.direct_bytes - from.direct_bytes,
        to.cache_bytes - from.cache_bytes,
    ]);
    const sum = (sign) => deltas.reduce((moved, delta) => moved + Math.max(0, sign * delta), 0);
    return Math.max(sum(1), sum(-1));
}

/** Nothing was moved, or not yet. */
const UNMOVED = new Set(["proposed", "superseded", "failed"]);
/** Nothing will ever be measured. */
const UNMEASURED = new Set(["superseded", "failed"]);

const canApply = (decision) => decision.state === "proposed" && app.host.mode !== "observe";

const TAKEN_BACK = new Set(["checking", "kept", "partly", "stopped"]);
const canRollBack = (decision) =>
    app.host.mode !== "observe" &&
    TAKEN_BACK.has(decision.state) &&
    decision.kind !== "rollback" &&
    decision.taken_back_by === null;

function ask(decision, verb, text, run) {
    app.question = { title: `${verb} decision ${decision.id}?`, text, verb, run };
    update();
}

const applyButton = (decision) =>
    h(
        "button",
        {
            class: "strong",
            disabled: app.host.paused,
            title: app.host.paused ? "Paused: resume first" : null,
            onclick: () =>
                ask(
                    decision,
                    "Apply",
                    `Memory of ${plural(decision.steps.length, "VM")} will be moved, ${bytes(movedBytes(decision))} in all. The result is measured, and rolled back if a VM exceeds its limit.`,
                    () => apply(decision.id),
                ),
        },
        "Apply",
    );

const rollbackButton = (decision) =>
    h(
        "button",
        {
            class: "plain",
            disabled: app.host.paused,
            title: app.host.paused ? "Paused: resume first" : null,
            onclick: () =>
                ask(
                    decision,
                    "Take back",
                    "Each VM returns to its previous size, as far as that memory is available.",
                    () => rollback(decision.id),
                ),
        },
        "Take back",
    );

/** A proposal that waits for somebody, on the board. */
export function proposalBanner() {
    const { proposal } = app;
    if (proposal?.state !== "proposed") return null;
    return h(
        "section",
        { class: "proposal", "aria-label": "Proposal" },
        h(
            "div",
            {},
            h("b", {}, `Proposal ${proposal.id}: `),
            proposal.reason,
            " ",
            h(
                "span",
                { class: "sum" },
                `${bytes(movedBytes(proposal))} would be moved among ${plural(proposal.steps.length, "VM")}.`,
            ),
        ),
        h(
            "p",
            { class: "buttons" },
            h("a", { class: "button plain", href: `#/decisions/${proposal.id}` }, "See it"),
            canApply(proposal) && applyButton(proposal),
        ),
    );
}

export function decisionsView() {
    const { decisions, route } = app;
    const { list, error, end, waiting } = decisions;
    const chosen = route.name ? Number(route.name) : null;
    return h(
        "div",
        { class: "view" },
        h(
            "div",
            { class: "view-head" },
            h("h1", {}, "Decisions"),
            h("p", {}, "Newest first, with the misses predicted for its VMs and those measured afterwards."),
        ),
        error && h("p", { class: "banner bad", role: "alert" }, `The log cannot be read: ${error}.`),
        !list && !error && h("p", { class: "hint" }, "Asking the daemon …"),
        list?.length === 0 &&
            h(
                "div",
                { class: "empty" },
                h("p", {}, h("b", {}, "No decisions yet.")),
                h(
                    "p",
                    {},
                    app.host.mode === "observe"
                        ? 'In mode observe nothing is decided: the daemon only traces and shows. Set mode = "advise" or "act" in its configuration.'
                        : "The daemon decides once the VMs' curves are available and another allocation is worth a move.",
                ),
            ),
        h(
            "ol",
            { class: "decisions" },
            (list ?? []).map((decision) => item(decision, decision.id === chosen)),
        ),
        list?.length > 0 &&
            (end
                ? h("p", { class: "hint" }, "That is all that is kept.")
                : h("button", { class: "plain", disabled: waiting, onclick: () => loadDecisions(true) }, "Older ones")),
    );
}

function item(decision, chosen) {
    const now = app.host.now_unix_ms;
    const { id, kind, by, mode, plan, steps, takes_back, taken_back_by } = decision;
    const lasted = decision.ended_unix_ms === null ? null : decision.ended_unix_ms - decision.unix_ms;
    return h(
        "li",
        {
            key: String(id),
            id: `decision-${id}`,
            class: `panel decision ${chosen ? "chosen" : ""}`,
            onpaint: (element) => scrollOnce(element, chosen),
        },
        h(
            "div",
            { class: "panel-head" },
            h(
                "h2",
                {},
                h("a", { href: `#/decisions/${id}` }, `${id}`),
                ` ${KINDS[kind] ?? kind}${kind === "rollback" && takes_back !== null ? ` decision ${takes_back}` : ""}`,
            ),
            state(decision.state),
            h(
                "p",
                { class: "sum" },
                moment(decision.unix_ms, now),
                `, by ${by === "operator" ? "an operator" : "the daemon"} in mode ${mode}`,
                lasted !== null && lasted >= 1000 && !UNMOVED.has(decision.state) ? `, took ${duration(lasted)}` : "",
            ),
            h("span", { class: "space" }),
            canApply(decision) && applyButton(decision),
            canRollBack(decision) && rollbackButton(decision),
        ),
        h("p", { class: "reason" }, decision.reason),
        ((takes_back !== null && kind !== "rollback") || taken_back_by !== null) &&
            h(
                "p",
                { class: "sum" },
                taken_back_by !== null && [
                    "Taken back by ",
                    h("a", { href: `#/decisions/${taken_back_by}` }, `decision ${taken_back_by}`),
                    ".",
                ],
            ),
        plan &&
            h(
                "p",
                { class: "sum" },
                `Misses relative to the baseline, geometric mean: ${times(plan.geometric_mean_now)} before, ${times(plan.geometric_mean)} predicted`,
                plan.gap ? `, at most ${(plan.gap * 100).toFixed(2)} % above the optimum` : "",
                `; ${bytes(plan.spare_bytes)} spare.`,
            ),
        checksTable(decision),
        steps.length > 0 &&
            h(
                "details",
                {},
                h(
                    "summary",
                    {},
                    `${plural(steps.length, "step")}, ${bytes(movedBytes(decision))} ${UNMOVED.has(decision.state) ? "to move" : "moved"}`,
                ),
                h(
                    "div",
                    { class: "scroll", tabindex: 0, role: "region", "aria-label": `Steps of decision ${id}` },
                    stepsTable(steps),
                ),
            ),
    );
}

let scrolledTo = null;

function scrollOnce(element, chosen) {
    const place = chosen ? `${app.visits} ${location.hash}` : null;
    if (!chosen || scrolledTo === place) return;
    scrolledTo = place;
    element.scrollIntoView({ block: "start" });
}

/** What is limited of a VM: its misses relative to the baseline, their number, and waiting for memory of the host. */
function measures(check, target) {
    const relative = check?.predicted ?? target?.relative ?? null;
    const max_loss = target?.max_loss ?? null;
    const bound = check?.bound ?? (max_loss === null ? null : 1 + max_loss);
    const lines = [
        {
            predicted: times(relative?.expected),
            band: relative && `${times(relative.low)} to ${times(relative.high)}`,
            measured: times(check?.measured),
            bound: times(bound),
            picture: whisker(relative, bound, check?.measured ?? null),
        },
    ];
    if (check?.misses) {
        const { predicted_per_second, predicted_high_per_second, measured_per_second, bound_per_second } = check.misses;
        lines.push({
            predicted: rate(predicted_per_second),
            band: `up to ${rate(predicted_high_per_second)}`,
            measured: rate(measured_per_second),
            bound: rate(bound_per_second),
        });
    } else if (!check && (target?.max_misses_per_second ?? null) !== null) {
        lines.push({
            predicted: rate(target.misses_per_second),
            band: `${rate(target.misses_low_per_second)} to ${rate(target.misses_high_per_second)}`,
            bound: rate(target.max_misses_per_second),
        });
    }
    if (check?.stall) {
        const { before_ratio, measured_ratio, bound_ratio } = check.stall;
        lines.push({
            predicted: "waiting",
            band: `Share of the time in which a thread of its QEMU waited for memory of the host; ${percent(before_ratio)} before the move`,
            measured: percent(measured_ratio),
            bound: percent(bound_ratio),
        });
    }
    return lines;
}

/** Per VM what was predicted and, once it was measured, what came. */
function checksTable({ id, checks, plan, steps, state: now, ended_unix_ms }) {
    if (UNMEASURED.has(now) && !checks.length) return null;
    const measured = new Map(checks.map((check) => [check.vm, check]));
    const targets = new Map((plan?.targets ?? []).map((target) => [target.vm, target]));
    const names = checks.length
        ? [...measured.keys()]
        : steps.map(({ vm }) => vm).filter((vm) => targets.get(vm)?.relative);
    if (!names.length) return null;
    return h(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": `Predicted and measured of decision ${id}` },
        h(
            "table",
            { class: "checks" },
            h(
                "thead",
                {},
                h(
                    "tr",
                    {},
                    ["VM", "Size", "Predicted", "Measured", "At most", ""].map((text, index) =>
                        h(
                            "th",
                            { scope: "col", class: index === 5 ? "pic" : null },
                            text || h("span", { class: "unseen" }, "Picture"),
                        ),
                    ),
                    h("th", { scope: "col" }, "Promise"),
                    h("th", { scope: "col", class: "why" }, "Why"),
                ),
            ),
            h(
                "tbody",
                {},
                names.map((vm) => {
                    const check = measured.get(vm);
                    const target = targets.get(vm);
                    const step = steps.find((candidate) => candidate.vm === vm);
                    const lines = measures(check, target);
                    const cells = (of) => lines.map((line) => h("div", {}, of(line)));
                    return h(
                        "tr",
                        { key: vm, "data-vm": vm },
                        h("th", { scope: "row" }, h("a", { href: `#/vm/${encodeURIComponent(vm)}` }, vm)),
                        h("td", {}, step ? [bytes(total(step.from)), " → ", bytes(total(step.to))] : "–"),
                        h(
                            "td",
                            { class: "predicted" },
                            lines.map(({ predicted, band }) => h("div", { title: band }, predicted)),
                        ),
                        h(
                            "td",
                            { class: "measured", title: check ? `by ${check.by}` : null },
                            check ? cells((line) => line.measured) : ended_unix_ms === null ? "not yet" : "–",
                        ),
                        h(
                            "td",
                            {},
                            cells((line) => line.bound),
                        ),
                        h("td", { class: "pic" }, lines[0].picture),
                        h("td", {}, check ? verdict(check.verdict) : "–"),
                        h("td", { class: "why" }, [check?.why, target && margin(target)].filter(Boolean).join(". ")),
                    );
                }),
            ),
        ),
    );
}

/** How far below its bounds a VM was planned, in a line. */
function margin(target) {
    const text = margins(target);
    return text && `Planned with ${text}`;
}

const STEP_SHAPES = { done: "safe", late: "tight", stuck: "violating", short: "tight", failed: "violating", gone: "violating" };

function stepsTable(steps) {
    const pair = (from, to) => [size(from), from === to ? "" : [" → ", size(to), ` (${change(to - from)})`]];
    return h(
        "table",
        {},
        h(
            "thead",
            {},
            h(
                "tr",
                {},
                ["VM", "Own", "Cache", "Last seen", "State", "What went wrong"].map((text) =>
                    h("th", { scope: "col" }, text),
                ),
            ),
        ),
        h(
            "tbody",
            {},
            steps.map((step) =>
                h(
                    "tr",
                    { key: step.vm },
                    h("th", { scope: "row" }, step.vm),
                    h("td", {}, pair(step.from.direct_bytes, step.to.direct_bytes)),
                    h("td", {}, pair(step.from.cache_bytes, step.to.cache_bytes)),
                    h("td", {}, `${bytes(step.now.direct_bytes)} own, ${bytes(step.now.cache_bytes)} cache`),
                    h("td", {}, h("span", { class: "badge" }, shape(STEP_SHAPES[step.state] ?? "unknown"), step.state)),
                    h("td", { class: "why" }, step.error ?? "–"),
                ),
            ),
        ),
    );
}
