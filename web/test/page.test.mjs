// The page in headless Chromium, against the example host of `cargo run -p plimsoll-daemon --example board`.
//
// States that the example is not in (no VMs, a hostile name, a refusal) are made from its own answers on their way.
// Run by web/test/run.sh, which sets PAGE_MODULES, PAGE_BOARD and, to keep pictures of every view, PAGE_SHOTS.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { after, afterEach, before, beforeEach, test } from "node:test";

const require = createRequire(`${process.env.PAGE_MODULES}/`);
const { chromium } = require("playwright-core");
const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const CHROMIUM = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);
const SHOTS = process.env.PAGE_SHOTS;

/** Starts the example host; `stop` ends it. */
async function startBoard(port = 0) {
    const child = spawn(process.env.PAGE_BOARD, [String(port)], { stdio: ["ignore", "pipe", "inherit"] });
    const url = await new Promise((resolve, reject) => {
        child.once("exit", (code) => reject(new Error(`the board ended with ${code}`)));
        let text = "";
        child.stdout.on("data", (data) => {
            text += data;
            const match = /(http:\/\/\S+)\n/.exec(text);
            if (match) resolve(new URL(match[1]));
        });
    });
    const token = url.hash.slice("#token=".length);
    const ended = new Promise((resolve) => child.once("exit", resolve));
    const stop = async () => {
        child.kill();
        await ended;
    };
    const api = async (path, options = {}) =>
        (
            await fetch(new URL(path, url), {
                ...options,
                headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
            })
        ).json();
    return { url, token, api, stop };
}

let board;
let browser;
let page;
let complaints;

before(async () => {
    assert.ok(CHROMIUM, "Chromium is missing: apt-get install chromium");
    board = await startBoard();
    // Root, as in continuous integration, has no sandbox.
    browser = await chromium.launch({ executablePath: CHROMIUM, args: process.getuid() === 0 ? ["--no-sandbox"] : [] });
});

after(async () => {
    await browser?.close();
    await board?.stop();
});

beforeEach(async () => {
    page = await newPage();
});

afterEach(async () => {
    // It asks nothing more. An answer that `rewrite` has not read yet would be gone with its context.
    await page.goto("about:blank");
    await page.unrouteAll({ behavior: "wait" });
    await page.context().close();
    assert.deepEqual(complaints, [], "the browser's console stays empty");
});

async function newPage(options = {}) {
    const context = await browser.newContext({
        viewport: { width: 1280, height: 900 },
        reducedMotion: "reduce",
        ...options,
    });
    const fresh = await context.newPage();
    complaints = [];
    fresh.on("console", (message) => {
        if (["error", "warning"].includes(message.type())) complaints.push(message.text());
    });
    fresh.on("pageerror", (error) => complaints.push(String(error)));
    fresh.on("dialog", (dialog) => {
        complaints.push(`a dialog: ${dialog.message()}`);
        dialog.dismiss();
    });
    return fresh;
}

/** Opens a view, logged in by the address the first time. */
async function open(view = "host", base = board) {
    if (page.url() === "about:blank") await page.goto(base.url.href);
    await page.goto(new URL(`#/${view}`, base.url).href);
    // Not the view that was there before.
    await page.waitForFunction((asked) => document.querySelector("main:has(.view)")?.key.startsWith(asked), `${view}/`);
}

/** Changes the daemon's answers to `path` on their way. */
const rewrite = (path, change) =>
    page.route(
        (url) => url.pathname === path,
        async (route) => {
            const response = await route.fetch();
            await route.fulfill({ response, json: change(await response.json()) });
        },
    );

const shot = async (name) => SHOTS && page.screenshot({ path: `${SHOTS}/${name}.png`, fullPage: true });
const number = async (selector) => Number(await page.locator(selector).first().getAttribute("value"));
const bright = (color) =>
    color
        .match(/[\d.]+/g)
        .slice(0, 3)
        .map(Number)
        .reduce((sum, part) => sum + part, 0) / 3;

/** What axe finds wrong with the view as it is. */
async function axe() {
    // By the debugger, which the content security policy does not bind.
    await page.evaluate(AXE);
    const { violations } = await page.evaluate(() =>
        window.axe.run(document, {
            runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
        }),
    );
    return violations.map(
        ({ id, nodes }) =>
            `${id}: ${nodes
                .map((node) => `${node.target} ${node.any.map((check) => check.message).join("; ")}`)
                .slice(0, 3)
                .join(" | ")}`,
    );
}

test("the token leaves the address and is sent with every question", async () => {
    await page.goto(board.url.href);
    await page.locator("main .view").waitFor();
    assert.equal(new URL(page.url()).hash, "");
    assert.equal(await page.evaluate(() => sessionStorage.getItem("plimsoll-token")), board.token);
    assert.equal(await page.evaluate(() => localStorage.getItem("plimsoll-token")), null);
});

test("without a token the page asks for one, and goes on with it", async () => {
    await page.goto(board.url.origin);
    await page.getByLabel("Token").fill(board.token);
    await page.getByRole("button", { name: "Enter" }).click();
    await page.locator("main .view").waitFor();
    // The refused questions are the browser's own words, and right.
    assert.ok(
        complaints.every((text) => text.includes("401")),
        complaints.join(),
    );
    complaints = [];
});

test("the board shows the numbers of the API", async () => {
    // Frozen, so that both sides are asked about the same turn.
    const host = await board.api("/v1/host");
    await rewrite("/v1/host", () => host);
    await open();
    const { memory } = host;
    assert.equal(await number("#memory-total"), memory.total_bytes);
    assert.equal(await number("#memory-divided"), memory.divided_bytes);
    assert.equal(await number("#memory-direct"), memory.vms_direct_bytes);
    assert.equal(await number("#memory-cache"), memory.vms_cache_bytes);
    assert.equal(await number("#memory-store"), memory.store_bytes);
    assert.equal(await number("#memory-spare"), memory.spare_bytes);
    assert.equal(await number("#memory-outside"), memory.total_bytes - memory.divided_bytes);
    assert.equal(await number("#memory-available"), memory.available_bytes);
    assert.equal(await number("#reclaimable"), memory.reclaimable_bytes);
    for (const status of ["violating", "tight", "safe", "unknown"]) {
        const expected = host.vms.filter((vm) => vm.status === status).length;
        assert.equal(await page.locator(`.tile.${status} .number`).textContent(), String(expected), status);
    }
    assert.equal(await page.locator(".vm-row[data-vm]").count(), host.vms.length);
    for (const vm of host.vms) {
        const row = `.vm-row[data-vm="${vm.vm}"]`;
        assert.equal(await number(`${row} .size`), vm.size_bytes);
        assert.equal(await page.locator(`${row} .badge`).textContent(), vm.status);
        const shown = await page.locator(`${row} .relative`).textContent();
        assert.equal(shown, vm.relative ? `${vm.relative.expected.toFixed(2)}×` : "–");
        if (vm.working_set) assert.equal(await number(`${row} .working-set data`), vm.working_set.bytes);
        if (vm.reclaimable_bytes !== null) assert.equal(await number(`${row} .reclaimable`), vm.reclaimable_bytes);
        assert.equal(
            await page.locator(`${row} .tag`, { hasText: "emulated" }).count(),
            vm.accelerator === "tcg" ? 1 : 0,
        );
    }
    const widths = await page
        .locator(".stack .part")
        .evaluateAll((parts) => parts.map((part) => part.getBoundingClientRect().width));
    const direct = widths[0] / widths.reduce((sum, width) => sum + width, 0);
    assert.ok(Math.abs(direct - memory.vms_direct_bytes / memory.total_bytes) < 0.02, `the bar is to scale: ${direct}`);
});

test("control groups are listed with the numbers of the API, and their names are text", async () => {
    const host = await board.api("/v1/host");
    await rewrite("/v1/host", () => host);
    await open();
    const { watched, left_out: leftOut } = host.groups;
    assert.equal(await page.locator("tr[data-group]").count(), watched.length);
    const rows = page.locator("tr[data-group]");
    for (const [index, group] of watched.entries()) {
        const row = rows.nth(index);
        const path = group.path.replace("\u001b", "\\u{1b}");
        assert.equal(await row.locator("th").textContent(), group.group + path);
        assert.equal(await row.locator("th .hint").textContent(), path);
        assert.equal(Number(await row.locator("data.charged").getAttribute("value")), group.charged_bytes);
    }
    assert.equal(await page.locator("tr[data-group] b").count(), 0);
    const account = await page.locator(".left-out").first().textContent();
    assert.ok(account.startsWith(`${leftOut[0].count} groups not watched: `), account);
});

test("a VM's page shows the numbers of the API", async () => {
    const vm = await board.api("/v1/vms/search");
    const host = await board.api("/v1/host");
    await rewrite("/v1/host", () => host);
    await open("vm/search");
    assert.equal(await number("#n-size data"), vm.size_bytes);
    assert.equal(await number("#n-promise data"), vm.promise_bytes);
    assert.equal(await page.locator("#n-relative").textContent(), `${vm.relative.expected.toFixed(2)}×`);
    await page.locator(".curve-line").waitFor();
    assert.match(await page.locator(".mark.now text").textContent(), /^now /);
    await page.locator("svg.time .set").waitFor();
    assert.ok((await page.locator("#fact-references").textContent()).replaceAll(",", "") === String(vm.references));
    assert.equal(await page.locator("#fact-claims").textContent(), String(vm.refused_claims));
});

test("a bound on the rise of misses stands beside what it is compared with, and one on their number beside misses a second", async () => {
    const vm = await board.api("/v1/vms/search");
    const at = (size) => vm.relative_points.findLast((point) => point.size_pages * vm.curve.page_bytes <= size);
    assert.deepEqual({ ...at(vm.size_bytes), size_pages: undefined }, { ...vm.relative, size_pages: undefined });
    const name = page.locator(".curve .axis-name").last();
    const bandAt = async (x) => {
        const d = await page.locator(".curve-band").getAttribute("d");
        return page.evaluate(
            ([d, x]) => {
                const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
                path.setAttribute("d", d);
                const svg = document.querySelector("svg.curve");
                svg.append(path);
                const inside = [];
                for (let y = 0; y < 340; y += 0.25) {
                    const point = svg.createSVGPoint();
                    point.x = x;
                    point.y = y;
                    if (path.isPointInFill(point)) inside.push(y);
                }
                path.remove();
                return [inside.at(-1), inside[0]];
            },
            [d, x],
        );
    };
    await open("vm/search");
    await page.locator(".curve-line").waitFor();
    assert.equal(await name.textContent(), "misses over the baseline's");
    assert.match(await page.locator(".bound-line text").textContent(), /1\.25×/);
    const bound = Number(await page.locator(".bound-line line").getAttribute("y1"));
    const bottom = 300;
    // At its baseline the quotient is exactly 1, so at smaller sizes.
    const handle = page.locator("#handle");
    for (let times = 0; times < 3; times += 1) {
        await handle.press("PageDown");
        const shown = at(Number(await handle.getAttribute("aria-valuenow")));
        const x = Number(await handle.locator(".knob").getAttribute("cx"));
        const [low, high] = (await bandAt(x)).map((y) => ((bottom - y) / (bottom - bound)) * (1 + vm.settings.max_loss));
        assert.ok(shown.low < shown.high);
        assert.ok(Math.abs(low - shown.low) < 0.01, `${low} ${shown.low}`);
        assert.ok(Math.abs(high - shown.high) < 0.01, `${high} ${shown.high}`);
    }

    const settings = { ...vm.settings, max_misses_per_second: 20 };
    const numbered = (summary) => (summary.vm === "search" ? { ...summary, settings } : summary);
    await rewrite("/v1/host", (host) => ({ ...host, vms: host.vms.map(numbered) }));
    await page.goto("about:blank");
    await open("vm/search");
    await page.locator(".curve-line").waitFor();
    assert.equal(await name.textContent(), "misses, share of references");
});

test("the handle is dragged, and tells what the API predicts there", async () => {
    await open("vm/search");
    const knob = page.locator("#handle .knob");
    await knob.waitFor();
    const box = await knob.boundingBox();
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    await page.mouse.move(x, y);
    await page.mouse.down();
    await page.mouse.move(x - 150, y + 10, { steps: 8 });
    await page.mouse.up();
    const tried = await number("#handle-size");
    const before = (await board.api("/v1/vms/search")).size_bytes;
    assert.ok(tried < before, `${tried} is less than ${before}`);
    const moved = await knob.boundingBox();
    assert.ok(Math.abs(moved.x - (box.x - 150)) < 12, "the knob is where the pointer is");
    await readsAsPredicted(tried);
});

async function readsAsPredicted(tried) {
    await page.locator('.curve-panel .readout[aria-busy="false"]').waitFor();
    const predicted = await board.api(`/v1/vms/search/whatif?size_bytes=${tried}`);
    await page.waitForFunction(
        (text) => document.querySelector("#handle-relative")?.textContent === text,
        `${predicted.relative_then.expected.toFixed(2)}×`,
    );
    assert.ok((await page.locator(".readout").first().textContent()).includes(predicted.why));
}

test("the handle is moved by keys alone", async () => {
    await open("vm/search");
    const handle = page.locator("#handle");
    await handle.focus();
    const now = Number(await handle.getAttribute("aria-valuenow"));
    await page.keyboard.press("ArrowLeft");
    await page.keyboard.press("ArrowLeft");
    const one = (now - (await valueAfter(handle, now))) / 2;
    assert.ok(one >= 4 * 2 ** 20, `a step is ${one}`);
    const there = Number(await handle.getAttribute("aria-valuenow"));
    await page.keyboard.press("PageDown");
    assert.equal(there - (await valueAfter(handle, there)), 10 * one);
    await page.keyboard.press("Home");
    await page.waitForFunction(
        () =>
            document.querySelector("#handle").getAttribute("aria-valuenow") ===
            document.querySelector("#handle").getAttribute("aria-valuemin"),
    );
    assert.equal(await page.evaluate(() => document.activeElement.id), "handle", "the focus outlives refreshes");
    await page.keyboard.press("Escape");
    assert.equal(await valueAfter(handle, -1), now);
});

/** Waits until what was asked for is drawn: the page draws once a frame. */
const drawn = () =>
    page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));

async function valueAfter(handle, before) {
    await drawn();
    const value = Number(await handle.getAttribute("aria-valuenow"));
    assert.notEqual(value, before);
    return value;
}

test("the slider asks the allocator, and shows its division of what it rests at", async () => {
    await open();
    const asked = [];
    page.on("request", (request) => {
        const url = new URL(request.url());
        if (url.pathname === "/v1/whatif") asked.push(Number(url.searchParams.get("lose_bytes")));
    });
    await page.locator("#lose").focus();
    for (let press = 0; press < 4; press += 1) await page.keyboard.press("ArrowRight");
    await drawn();
    const lost = await number("#lose-value data");
    assert.ok(lost > 0);
    await page.locator('.division[aria-busy="false"] table.then tbody tr').first().waitFor();
    assert.equal(asked.at(-1), lost);
    const { plan } = await board.api(`/v1/whatif?lose_bytes=${lost}`);
    for (const target of plan.targets)
        assert.equal(await number(`table.then tr[data-vm="${target.vm}"] .then-size`), target.target_bytes);
    assert.equal(await page.locator("#mean-then").textContent(), `${plan.geometric_mean.toFixed(2)}×`);
    await shot("host-lose");
});

test("a loss that breaks promises is refused with the reason", async () => {
    await open();
    await page.locator("#lose").focus();
    await page.keyboard.press("End");
    await drawn();
    const lost = await number("#lose-value data");
    const { plan, refusal } = await board.api(`/v1/whatif?lose_bytes=${lost}`);
    assert.equal(plan, null);
    await page.locator('.division[aria-busy="false"] #refusal').waitFor();
    assert.ok((await page.locator("#refusal").textContent()).includes(refusal));
    assert.deepEqual(await axe(), []);
    await shot("host-refusal");
});

test("a VM's name is text, whatever is in it", async () => {
    const name = `<img src=x onerror=alert(1)>/"'&#x3c;%2f`;
    const rename = (vm) => (vm.vm === "search" ? { ...vm, vm: name, why: `<script>alert(2)</script>` } : vm);
    await rewrite("/v1/host", (host) => ({
        ...host,
        warnings: ["<b onclick=alert(3)>warned</b>"],
        vms: host.vms.map(rename),
    }));
    const asked = [];
    await page.route(
        (url) => url.pathname.startsWith("/v1/vms/%3Cimg"),
        async (route) => {
            const { pathname, search } = new URL(route.request().url());
            asked.push(pathname);
            const real = ["/v1/vms/search", ...pathname.split("/").slice(4)].join("/") + search;
            await route.fulfill({ json: rename(await board.api(real)) });
        },
    );
    await open();
    await page.getByRole("link", { name }).click();
    await page.locator(".vm-view").waitFor();
    assert.ok((await page.locator("h1").textContent()).startsWith(name));
    assert.equal(await page.locator("main img, main script, main [onclick]").count(), 0);
    assert.ok(
        asked.every((path) => decodeURIComponent(path.split("/")[3]) === name),
        asked.join(),
    );
    assert.ok(asked.length > 0);
});

test("many warnings are folded, and none is lost", async () => {
    const warnings = Array.from({ length: 300 }, (_, index) => `warning ${index}`);
    await rewrite("/v1/host", (host) => ({ ...host, warnings }));
    await open();
    const shown = page.locator(".warnings li:visible");
    assert.equal(await shown.count(), 5);
    await page.getByText("295 more of 300 warnings").click();
    assert.equal(await shown.count(), 300);
});

test("each reason of an allocation is a sentence", async () => {
    const reasons = ["kept", "unknown", "no-working-set", "no-rate", "gains", "gives", "gives-to-its-bound", "limits", "host-short"];
    await page.route(
        (url) => url.pathname === "/v1/whatif",
        async (route) => {
            const answer = await (await route.fetch()).json();
            const { targets } = answer.plan;
            answer.plan.targets = reasons.map((reason, index) => ({ ...targets[0], vm: `vm${index}`, reason }));
            await route.fulfill({ json: answer });
        },
    );
    await open();
    await page.locator("#lose").press("ArrowRight");
    const whys = page.locator("table.then td.why");
    await whys.first().waitFor();
    const texts = await whys.allTextContents();
    assert.equal(texts.length, reasons.length);
    assert.ok(
        texts.every((text) => text.includes(" ") && !reasons.includes(text)),
        texts.join("; "),
    );
});

test("a lost connection is said, with the age of what is seen, and found again", async () => {
    let mine = await startBoard();
    try {
        await open("host", mine);
        await mine.stop();
        await page.locator("#lost").waitFor();
        assert.match(await page.locator("#lost").textContent(), /Connection lost: .* is \d+ m?s old/);
        assert.ok((await page.locator(".vm-row[data-vm]").count()) > 0, "what was seen stays");
        await shot("host-lost");
        mine = await startBoard(Number(mine.url.port));
        await page.locator("#lost").waitFor({ state: "detached" });
    } finally {
        await page.goto("about:blank");
        await mine.stop();
    }
    assert.ok(
        complaints.every((text) => /ERR_|Failed to load/.test(text)),
        complaints.join(),
    );
    complaints = [];
});

test("pause stops and resume goes on, by keys", async () => {
    await open();
    await page.getByRole("button", { name: "Pause" }).focus();
    await page.keyboard.press("Enter");
    await page.locator("#paused").waitFor();
    assert.equal((await board.api("/v1/host")).paused, true);
    await page.getByRole("button", { name: "Resume" }).press("Enter");
    await page.locator("#paused").waitFor({ state: "detached" });
    assert.equal((await board.api("/v1/host")).paused, false);
});

test("decisions show predicted beside measured", async () => {
    const { decisions } = await board.api("/v1/decisions?limit=30");
    await open("decisions");
    await page.locator(".decision").first().waitFor();
    for (const decision of decisions) {
        const item = `#decision-${decision.id}`;
        assert.ok((await page.locator(`${item} .reason`).textContent()).includes(decision.reason));
        for (const check of decision.checks) {
            const row = `${item} .checks tr[data-vm="${check.vm}"]`;
            if (check.predicted)
                assert.equal(
                    await page.locator(`${row} td.predicted div`).first().textContent(),
                    `${check.predicted.expected.toFixed(2)}×`,
                );
            assert.equal(
                await page.locator(`${row} td.measured div`).first().textContent(),
                check.measured === null ? "–" : `${check.measured.toFixed(2)}×`,
            );
            assert.ok((await page.locator(`${row} .badge`).textContent()).includes(check.verdict));
        }
        for (const target of decision.plan?.targets ?? []) {
            const row = page.locator(`${item} .checks tr[data-vm="${target.vm}"] td.why`);
            if (target.max_loss === null || !target.relative || !(await row.count())) continue;
            const room = 1 + target.max_loss - target.relative.high;
            const left = `${Math.abs(room).toFixed(2)}× ${room < 0 ? "above" : "to spare"}`;
            assert.ok((await row.textContent()).includes(`Planned with ${left}`), `${target.vm}: ${left}`);
        }
    }
    assert.ok(
        decisions.some((decision) => decision.checks.length > 0),
        "the example has checks",
    );
    await page.locator(".decision details summary").first().click();
    await page.locator(".decision details[open] tbody tr").first().waitFor();
});

test("a decision shows the promised number of misses and the waiting as well", async () => {
    const { decisions } = await board.api("/v1/decisions?limit=30");
    const { id, checks } = decisions.find((decision) => decision.checks.length);
    await rewrite("/v1/decisions", (answer) => {
        const check = answer.decisions.find((decision) => decision.id === id).checks[0];
        check.misses = {
            predicted_per_second: 12.25,
            predicted_high_per_second: 15,
            measured_per_second: null,
            bound_per_second: 20,
        };
        check.stall = { before_ratio: null, measured_ratio: 0.021, bound_ratio: 0.05 };
        return answer;
    });
    await open("decisions");
    const row = page.locator(`#decision-${id} .checks tr[data-vm="${checks[0].vm}"]`);
    await row.waitFor();
    const lines = (cell) => row.locator(`td:nth-child(${cell}) div`).allTextContents();
    assert.deepEqual((await lines(3)).slice(1), ["12/s", "waiting"]);
    assert.deepEqual((await lines(4)).slice(1), ["–", "2.1 %"]);
    assert.deepEqual((await lines(5)).slice(1), ["20/s", "5.0 %"]);
    await shot("decision-limits");
});

test("a decision in the address is shown, however old", async () => {
    const { decisions } = await board.api("/v1/decisions?limit=30");
    const kept = Array.from({ length: 70 }, (_, index) => ({ ...decisions.at(-1), id: 70 - index }));
    await page.route(
        (url) => url.pathname === "/v1/decisions",
        async (route) => {
            const before = Number(new URL(route.request().url()).searchParams.get("before") ?? Infinity);
            const page = kept.filter(({ id }) => id < before).slice(0, 30);
            await route.fulfill({ json: { schema: 1, decisions: page } });
        },
    );
    await open("decisions/7");
    await page.locator("#decision-7.chosen").waitFor();
    const shown = await page.locator(".decision h2 a").allTextContents();
    assert.deepEqual(shown.map(Number), kept.map(({ id }) => id));
    await page.getByText("That is all that is kept.").waitFor();
});

test("a proposal is applied only after a second word, and the daemon's answer is shown", async () => {
    const mine = await startBoard();
    try {
        await open("host", mine);
        const { proposal } = await mine.api("/v1/plan");
        assert.ok(proposal, "the example proposes");
        await page.locator(".proposal").getByRole("button", { name: "Apply" }).click();
        await page.getByRole("button", { name: "Leave it" }).click();
        assert.equal((await mine.api(`/v1/decisions/${proposal.id}`)).state, "proposed");
        await page.locator(".proposal").getByRole("button", { name: "Apply" }).click();
        await page.locator("dialog").getByRole("button", { name: "Apply" }).click();
        await page.locator("#notice").waitFor();
        assert.notEqual((await mine.api(`/v1/decisions/${proposal.id}`)).state, "proposed");
    } finally {
        await page.goto("about:blank");
        await mine.stop();
    }
});

test("in mode observe nothing can be applied or taken back", async () => {
    await rewrite("/v1/host", (host) => ({ ...host, mode: "observe" }));
    await open("decisions");
    await page.locator(".decision").first().waitFor();
    assert.equal(await page.getByRole("button", { name: /^(Apply|Take back)$/ }).count(), 0);
});

test("a refused change says why", async () => {
    await page.route(
        (url) => url.pathname === "/v1/pause",
        (route) =>
            route.fulfill({
                status: 403,
                json: { schema: 1, kind: "read-only", message: "this socket only shows; nothing was changed" },
            }),
    );
    await open();
    await page.getByRole("button", { name: "Pause" }).click();
    assert.match(await page.locator("#notice").textContent(), /this socket only shows; nothing was changed/);
    complaints = complaints.filter((text) => !text.includes("403"));
});

test("a control loop that stopped long ago is no live one", async () => {
    await rewrite("/v1/host", (host) => ({ ...host, turn: 7, now_unix_ms: Date.now() - 3 * 3_600_000 }));
    await open();
    await page.locator("#still").getByText("Its last turn ended 3 h ago.").waitFor();
    assert.match(await page.locator(".pulse").textContent(), /stopped/);
});

test("a second click does not take a pause back", async () => {
    const mine = await startBoard();
    try {
        await open("host", mine);
        await page.getByRole("button", { name: "Pause" }).dblclick({ delay: 20 });
        await page.locator("#paused").waitFor();
        assert.equal((await mine.api("/v1/host")).paused, true);
        await page.getByRole("button", { name: "Resume" }).click();
        await page.locator("#paused").waitFor({ state: "detached" });
    } finally {
        await page.goto("about:blank");
        await mine.stop();
    }
});

test("a token that is not accepted is called that", async () => {
    // No browser sends the second one.
    for (const wrong of ["wrong", "wrong–€"]) {
        await page.goto(board.url.origin);
        await page.evaluate(() => sessionStorage.clear());
        await page.reload();
        await page.getByLabel("Token").fill(wrong.repeat(8));
        await page.getByRole("button", { name: "Enter" }).click();
        await page.getByText("The token that was given is not accepted.").waitFor();
        assert.equal(await page.getByLabel("Token").inputValue(), "");
    }
    complaints = complaints.filter((text) => !text.includes("401"));
});

test("a proposal is asked for again once the daemon answers", async () => {
    let failures = 1;
    await page.route(
        (url) => url.pathname === "/v1/plan",
        (route) => (failures-- > 0 ? route.fulfill({ status: 500, json: {} }) : route.fallback()),
    );
    await open();
    await page.locator(".proposal").waitFor();
    complaints = complaints.filter((text) => !text.includes("500"));
});

test("the answer to an action is in view, and a VM has a limit", async () => {
    await open("vm/search");
    const asked = [];
    page.on("request", (request) => request.method() === "PATCH" && asked.push(request.url()));
    await page.getByLabel("Most rise of misses").fill("");
    await page.getByRole("button", { name: "Set", exact: true }).click();
    const notice = page.locator("#notice");
    assert.match(await notice.textContent(), /at least one of the three limits/);
    const { y, height } = await notice.boundingBox();
    assert.ok(y >= 0 && y + height <= 900, `${y}`);
    assert.deepEqual(asked, []);
});

test("what reorders a VM's name is shown as what it is", async () => {
    await rewrite("/v1/host", (host) => ({
        ...host,
        vms: host.vms.map((vm, index) => (index ? vm : { ...vm, vm: "abc\u202egnp.exe" })),
    }));
    // The board has it by its own name.
    await page.route(
        (url) => url.pathname.startsWith("/v1/vms/abc"),
        async (route) => {
            const { pathname, search } = new URL(route.request().url());
            const real = ["/v1/vms/search", ...pathname.split("/").slice(4)].join("/") + search;
            await route.fulfill({ json: await board.api(real) });
        },
    );
    await open();
    await page.locator(".vm-name", { hasText: "abc\\u{202e}gnp.exe" }).waitFor();
});

test("what a VM is promised is changed, and only what was changed is sent", async () => {
    await open("vm/web");
    const [request] = await Promise.all([
        page.waitForRequest((asked) => asked.method() === "PATCH"),
        (async () => {
            await page.getByLabel("Most rise of misses").fill("12.5");
            await page.getByRole("button", { name: "Set", exact: true }).click();
        })(),
    ]);
    assert.deepEqual(request.postDataJSON(), { max_loss: 0.125 });
    await page.locator("#notice").waitFor();
});

test("a host without VMs, and a VM without a curve, say why", async () => {
    await open("vm/fresh");
    await page.getByText("No curve yet.").waitFor();
    await shot("vm-no-curve");
    await rewrite("/v1/host", (host) => ({
        ...host,
        vms: [],
        memory: { ...host.memory, vms_direct_bytes: 0, vms_cache_bytes: 0, reclaimable_bytes: 0 },
    }));
    await open();
    await page.getByText("No VMs.").waitFor();
    assert.deepEqual(await axe(), []);
    await shot("host-empty");
});

test("light and dark follow the system until they are chosen by hand", async () => {
    const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    await page.emulateMedia({ colorScheme: "dark" });
    await open();
    assert.ok(bright(await ground()) < 60);
    await page.emulateMedia({ colorScheme: "light" });
    assert.ok(bright(await ground()) > 200);
    await page.getByRole("button", { name: /Theme/ }).click();
    assert.ok(bright(await ground()) < 60);
    await page.reload();
    await page.locator("main .view").waitFor();
    assert.ok(bright(await ground()) < 60, "it is remembered");
});

test("a refresh moves nothing and takes no focus", async () => {
    await open();
    await page.locator(".trend .outline").first().waitFor({ state: "attached" });
    const places = () =>
        page
            .locator("section, .vm-row")
            .evaluateAll((all) => all.map((element) => Math.round(element.getBoundingClientRect().top)));
    await page.locator(".vm-row a").nth(1).focus();
    const before = await places();
    const turn = (await board.api("/v1/host")).turn;
    await page.waitForFunction(
        (then) => Number(document.querySelector(".strip div:nth-child(3) b").textContent) > then,
        turn,
    );
    assert.deepEqual(await places(), before);
    assert.ok(await page.evaluate(() => document.activeElement.matches(".vm-row a")));
});

for (const view of ["host", "vm/search", "decisions", "trust"]) {
    for (const colorScheme of ["light", "dark"]) {
        for (const width of [360, 820, 1160]) {
            test(`${view} fits and is accessible, ${colorScheme}, ${width} px`, async () => {
                await page.setViewportSize({ width, height: 900 });
                await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
                await open(view);
                await page
                    .locator(
                        {
                            host: ".vm-row[data-vm]",
                            "vm/search": "svg.time .set",
                            decisions: ".decision",
                            trust: "table.trust",
                        }[view],
                    )
                    .first()
                    .waitFor();
                if (view === "vm/search") await page.locator(".curve-line").waitFor();
                const overflow = await page.evaluate(
                    () => document.documentElement.scrollWidth - document.documentElement.clientWidth,
                );
                assert.equal(overflow, 0, "nothing hangs out at the right");
                const outside = await page
                    .locator(".panel *, .strip *, .tile *")
                    .evaluateAll((all) =>
                        all
                            .filter(
                                (element) =>
                                    !element.closest(".scroll, svg, .unseen, .key, .stack") &&
                                    element.getBoundingClientRect().right >
                                        element.closest(".panel, .strip, .tile").getBoundingClientRect().right + 1,
                            )
                            .map((element) => `${element.nodeName}.${element.className}`),
                    );
                assert.deepEqual(outside, [], "nothing hangs out of its panel");
                assert.deepEqual(await axe(), []);
                await shot(`${view.replace("/", "-")}-${colorScheme}-${width}`);
            });
        }
    }
}
