// What the page knows, and how it comes to know more. Views read it; nothing here draws.

import * as api from "./api.js";

export const app = {
    /** The answer to `GET /v1/host`, and when what it says was so (`performance.now()`). */
    host: null,
    hostAt: 0,
    /** Why the last question went unanswered. */
    lost: null,
    /** The daemon wants a token. */
    locked: false,
    /** The proposal that `apply` would carry out. */
    proposal: null,
    route: { view: "host" },
    /** Which VMs the board shows, and in which order. */
    only: null,
    sort: "status",
    /** The slider "host loses X". */
    lose: { bytes: 0, answered: 0, answer: null, error: null },
    /** The VM whose page is open. */
    vm: null,
    decisions: { list: null, error: null, end: false, waiting: false },
    /** Samples of the last hour by VM, for the board's small lines. */
    trends: new Map(),
    /** What an action came to: `{ text, bad }`, with `{ paused, at }` of a pause. */
    notice: null,
    /** Counts the pages opened. */
    visits: 0,
    /** A question before an action: `{ title, text, verb, run }`. */
    question: null,
};

let drawing = false;
let draw = () => {};

/** Says who draws. */
export const onUpdate = (then) => {
    draw = then;
};

/** Draws anew before the next frame. */
export function update() {
    if (drawing) return;
    drawing = true;
    requestAnimationFrame(() => {
        drawing = false;
        draw();
    });
}

/** The age of what is shown, by this machine's own clock. */
export const ageMs = () => performance.now() - app.hostAt;

/** The daemon's clock now. */
export const nowUnixMs = () => (app.host ? app.host.now_unix_ms + ageMs() : Date.now());

/** Why a question failed, for people. */
const reason = (error) =>
    error instanceof api.Refused
        ? error.message
        : error.name === "TimeoutError"
          ? "the daemon did not answer in time"
          : error instanceof SyntaxError
            ? "the daemon's answer is not understood"
            : "the daemon cannot be reached";

const pause = (ms) => new Promise((wake) => setTimeout(wake, ms));

let asked = false;
let waker = () => {};

/** Has the host asked for at once, or again after the answer that is awaited. */
function wake() {
    asked = true;
    waker();
}

/** How long ago what a host says was so, by its own clock; dates of answers are whole seconds. */
const behindMs = (host) => Math.max(0, api.answeredUnixMs - host.now_unix_ms) || 0;

/** For how long a notice stays that the host contradicts: its state may be of before. */
const NOTICE_MS = 5000;

async function keepHost() {
    let failures = 0;
    for (;;) {
        asked = false;
        try {
            const host = await api.get("/v1/host");
            if (host.schema !== 1)
                throw new api.Refused(200, "schema", `the daemon uses schema ${host.schema}, this page 1: reload it`);
            // Another daemon, or one that was out of reach, may have decided otherwise.
            const isOther = failures > 0 || host.turn < app.host?.turn || unread;
            const now = performance.now();
            Object.assign(app, { host, hostAt: now - behindMs(host), lost: null, locked: false });
            failures = 0;
            const { notice } = app;
            if (notice?.at < now - NOTICE_MS && notice.paused !== host.paused) app.notice = null;
            if (isOther) loadProposal();
            if (isOther && app.decisions.list) loadDecisions();
            addToTrends(host);
            turned();
        } catch (error) {
            failures += 1;
            app.locked = error.status === 401;
            app.lost = reason(error);
        }
        update();
        // Woken by the next event; without one, a little later than the next turn.
        const wait = failures
            ? Math.min(500 * 2 ** failures, 8000)
            : Math.min(app.host.turn_interval_ms + 1000, 15_000);
        if (!asked) await Promise.race([pause(wait), new Promise((resolve) => (waker = resolve))]);
    }
}

async function follow() {
    for (;;) {
        try {
            await api.events((event) => {
                if (event.event === "turn") wake();
                if (event.event === "decision") {
                    loadProposal();
                    if (app.decisions.list) loadDecisions();
                    wake();
                }
            });
        } catch {
            // `keepHost` says what is wrong; it asks without events too.
        }
        wake();
        await pause(2000);
    }
}

/** Begins, and goes on as long as the page is open. */
export function begin() {
    keepHost();
    follow();
    loadProposal();
}

/** Asks at once. */
export const askNow = () => wake();

function turned() {
    if (app.vm) loadVm();
    if (app.lose.bytes) askLose();
}

/** The last question for a proposal failed. */
let unread = false;

async function loadProposal() {
    try {
        app.proposal = (await api.get("/v1/plan")).proposal;
        unread = false;
    } catch {
        app.proposal = null;
        unread = true;
    }
    update();
}

const PAGE = 30;
/** Pages that are read for a decision in the address. */
const PAGES_MAX = 100;

/** Whether the decision in the address may be among those not read yet. */
function isChosenOlder({ list, end }) {
    const chosen = app.route.view === "decisions" && app.route.name ? Number(app.route.name) : Number.NaN;
    return !end && list.length < PAGES_MAX * PAGE && list.at(-1)?.id > chosen;
}

/** The newest decisions, or those before the oldest known; and older ones until that in the address is there. */
export async function loadDecisions(more = false) {
    const decisions = app.decisions;
    if (decisions.waiting) return;
    decisions.waiting = true;
    try {
        let older = more && decisions.list?.length > 0;
        do {
            const known = decisions.list ?? [];
            const before = older ? `&before=${known.at(-1).id}` : "";
            const found = (await api.get(`/v1/decisions?limit=${PAGE}${before}`)).decisions;
            const oldest = found.at(-1)?.id ?? 0;
            // If all of a page is new, others may lie between it and those known.
            const isJoined = known.some(({ id }) => id >= oldest);
            const kept = isJoined ? known.filter(({ id }) => id < oldest) : [];
            decisions.list = older ? [...known, ...found] : [...found, ...kept];
            if (older || !kept.length) decisions.end = found.length < PAGE;
            older = true;
        } while (isChosenOlder(decisions));
        decisions.error = null;
    } catch (error) {
        decisions.error = reason(error);
    }
    decisions.waiting = false;
    update();
}

/** Hours of history that can be shown. */
export const RANGES = { "1 h": 1, "6 h": 6, "24 h": 24, "7 d": 168 };
const HOUR_MS = 3_600_000;
const POINTS = 400;

/** Opens a VM's page. */
export function openVm(name) {
    if (app.vm?.name === name) return;
    app.vm = {
        name,
        view: null,
        history: null,
        heat: null,
        error: null,
        historyError: null,
        heatError: null,
        range: "1 h",
        log: false,
        handle: null,
        whatif: null,
        whatifError: null,
        point: null,
        cell: null,
    };
    // Without the host there is no clock yet; its answer asks for the VM.
    if (app.host) loadVm();
}

/** Asks for all that a VM's page shows. */
export function loadVm() {
    const vm = app.vm;
    const part = (path, name, failed) =>
        api
            .get(api.vmPath(vm.name, path))
            .then(
                (answer) => Object.assign(vm, { [name]: answer, [failed]: null }),
                (error) => Object.assign(vm, { [failed]: reason(error) }),
            )
            .then(() => vm === app.vm && update());
    part("", "view", "error");
    // Before its tracer's first period a VM has no map, and asking for it would be an error.
    const traced = app.host.vms.find((candidate) => candidate.vm === vm.name)?.trace?.periods > 0;
    if (traced) part("/heatmap", "heat", "heatError");
    else vm.heatError = "Nothing yet: the map begins with the first period of its tracer.";
    const since = Math.round(nowUnixMs() - RANGES[vm.range] * HOUR_MS);
    part(`/history?since_unix_ms=${since}&points=${POINTS}`, "history", "historyError");
    if (vm.handle !== null) askWhatIf();
}

const BETWEEN_MS = 100;

/** A question about something that moves: one at a time, and anew as long as it has moved meanwhile. */
function latest(question) {
    let asking = false;
    let again = false;
    return async () => {
        again = true;
        if (asking) return;
        asking = true;
        while (again) {
            again = false;
            await question();
            update();
            await pause(BETWEEN_MS);
        }
        asking = false;
    };
}

/** What the VM would suffer at the handle's size. */
export const askWhatIf = latest(async () => {
    const vm = app.vm;
    if (!vm || vm.handle === null) return;
    try {
        const whatif = await api.get(api.vmPath(vm.name, `/whatif?size_bytes=${vm.handle}`));
        Object.assign(vm, { whatif, whatifError: null });
    } catch (error) {
        Object.assign(vm, { whatif: null, whatifError: reason(error) });
    }
});

/** How the host would be divided with less. */
export const askLose = latest(async () => {
    const lose = app.lose;
    const asked = lose.bytes;
    if (!asked) return;
    try {
        Object.assign(lose, { answer: await api.get(`/v1/whatif?lose_bytes=${asked}`), error: null });
    } catch (error) {
        Object.assign(lose, { answer: null, error: reason(error) });
    }
    lose.answered = asked;
});

const TREND_POINTS = 60;
const wanted = [];
let fetching = 0;
const FETCHING_MAX = 3;

/** Asks for a VM's last hour, once, a few VMs at a time. */
export function wantTrend(name) {
    if (app.trends.has(name)) return;
    app.trends.set(name, []);
    wanted.push(name);
    nextTrend();
}

async function nextTrend() {
    if (fetching >= FETCHING_MAX || !wanted.length) return;
    const name = wanted.shift();
    fetching += 1;
    try {
        const since = Math.round(nowUnixMs() - HOUR_MS);
        const answer = await api.get(api.vmPath(name, `/history?since_unix_ms=${since}&points=${TREND_POINTS}`));
        const newer = app.trends.get(name) ?? [];
        const last = answer.samples.at(-1)?.unix_ms ?? 0;
        app.trends.set(name, [...answer.samples, ...newer.filter((sample) => sample.unix_ms > last)]);
    } catch {
        // The line begins with the next turn instead.
    }
    fetching -= 1;
    update();
    nextTrend();
}

function addToTrends(host) {
    const names = new Set(host.vms.map((vm) => vm.vm));
    for (const name of app.trends.keys()) if (!names.has(name)) app.trends.delete(name);
    for (const vm of host.vms) {
        const samples = app.trends.get(vm.vm);
        if (!samples || samples.at(-1)?.unix_ms >= host.now_unix_ms) continue;
        samples.push({
            unix_ms: host.now_unix_ms,
            direct_bytes: vm.direct_bytes,
            cache_bytes: vm.cache_bytes,
            target_bytes: vm.target_bytes,
            working_set_bytes: vm.working_set?.bytes ?? null,
            working_set_bound: vm.working_set?.bound ?? null,
        });
        while (samples.length > 2 * TREND_POINTS || samples[0].unix_ms < host.now_unix_ms - HOUR_MS) samples.shift();
    }
}

let acting = false;

/** Does something that changes the daemon's state, one thing at a time, and says what came of it; whether it was done. */
async function act(question, done) {
    if (acting) return false;
    acting = true;
    let bad = false;
    try {
        const answer = await question();
        app.notice = { text: typeof done === "function" ? done(answer) : done, bad };
    } catch (error) {
        bad = true;
        app.notice = {
            text: `${error instanceof api.Refused ? "Refused" : "Whether that was done is unknown"}: ${reason(error)}`,
            bad,
        };
    }
    acting = false;
    askNow();
    loadProposal();
    if (app.decisions.list) loadDecisions();
    update();
    return !bad;
}

export async function setPaused(paused) {
    const done = await act(
        () => api.post(paused ? "/v1/pause" : "/v1/resume"),
        paused ? "Paused: nothing is moved until you resume." : "Resumed.",
    );
    if (done) Object.assign(app.notice, { paused, at: performance.now() });
}

export const apply = (decision) =>
    act(() => api.post("/v1/apply", { decision }), `Decision ${decision} is being applied.`);

export const rollback = (decision) =>
    act(
        () => api.post("/v1/rollback", { decision }),
        (taken) => `Decision ${decision} is being rolled back by decision ${taken?.id ?? "?"}.`,
    );

export const setVm = (vm, changes) =>
    act(() => api.patch(api.vmPath(vm), changes), `The limits of ${vm} are changed.`);
