// The page: its head, which view the address asks for, and drawing.

import { hasToken, keepToken, takeToken } from "./api.js";
import { onWidth } from "./chart.js";
import { decisionsView } from "./decisions.js";
import { h, morph, s } from "./dom.js";
import { hostView } from "./host.js";
import { ageMs, app, askNow, begin, loadDecisions, onUpdate, openVm, setPaused, update } from "./store.js";
import { changeTheme, onSystemTheme, theme } from "./themes.js";
import { trustView } from "./trust.js";
import { duration } from "./units.js";
import { vmView } from "./vm.js";

const VIEWS = {
    host: { title: "Host", view: hostView },
    decisions: { title: "Decisions", view: decisionsView },
    trust: { title: "Trust", view: trustView },
    vm: { view: vmView },
};

function readRoute() {
    const [view, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
    let name = null;
    try {
        name = decodeURIComponent(rest.join("/"));
    } catch {
        // No name can be read from it.
    }
    const moved = app.route.view !== view || app.route.name !== name;
    app.route = Object.hasOwn(VIEWS, view) ? { view, name } : { view: "host" };
    if (app.route.view === "vm" && name) openVm(name);
    else app.vm = null;
    if (app.route.view === "decisions") loadDecisions();
    if (moved) {
        app.notice = null;
        app.visits += 1;
    }
    scrollTo(0, 0);
    update();
}

const logo = () =>
    s(
        "svg",
        { class: "logo", viewBox: "0 0 34 26", "aria-hidden": "true" },
        s("circle", { cx: 17, cy: 13, r: 9.5 }),
        s("path", { d: "M2 13h30" }),
    );

function head() {
    const { host, route } = app;
    return h(
        "header",
        { class: "head" },
        h("a", { class: "skip", href: "#main", onclick: skip }, "Skip to content"),
        h(
            "a",
            { class: "brand", href: "#/host", "aria-label": "Plimsoll: the host" },
            logo(),
            h("span", {}, "Plimsoll"),
        ),
        h("span", { class: "hostname", title: host ? `plimsolld ${host.version}` : null }, host?.host ?? ""),
        h(
            "nav",
            { "aria-label": "Views" },
            Object.entries(VIEWS)
                .filter(([, view]) => view.title)
                .map(([name, { title }]) =>
                    h(
                        "a",
                        {
                            href: `#/${name}`,
                            "aria-current":
                                route.view === name || (name === "host" && route.view === "vm") ? "page" : null,
                        },
                        title,
                    ),
                ),
        ),
        h("span", { class: "space" }),
        pulse(),
        h(
            "button",
            {
                class: "quiet",
                onclick: () => {
                    changeTheme();
                    update();
                },
                "aria-label": `Theme: ${theme()}. Change it`,
            },
            s(
                "svg",
                { class: "icon", viewBox: "0 0 20 20", "aria-hidden": "true" },
                s("circle", { cx: 10, cy: 10, r: 7.2, class: "line" }),
                s("path", { d: "M10 2.8a7.2 7.2 0 0 1 0 14.4z" }),
            ),
        ),
        host &&
            h(
                "button",
                {
                    class: host.paused ? "strong" : "plain",
                    // The second click of two would undo the first.
                    onclick: (event) => event.detail > 1 || setPaused(!host.paused),
                },
                host.paused ? "Resume" : "Pause",
            ),
    );
}

function skip(event) {
    event.preventDefault();
    document.getElementById("main").focus();
}

/** Whether the daemon answers, but its turns have ended. */
const hasStopped = ({ host, lost }) => host && !lost && ageMs() > 3 * host.turn_interval_ms + 5000;

function pulse() {
    const { host, lost } = app;
    if (!host) return h("span", { class: "pulse" }, "");
    const state = lost ? "lost" : hasStopped(app) ? "stopped" : "live";
    return h(
        "span",
        { class: `pulse ${state === "live" ? state : "lost"}`, title: "Age of what is shown" },
        h("i", { "aria-hidden": "true" }),
        h("span", {}, state),
        h("b", {}, ` ${duration(Math.max(1000, ageMs()))}`),
    );
}

function banners() {
    const { host, lost, locked, notice } = app;
    return h(
        "div",
        { class: "banners" },
        lost &&
            host &&
            !locked &&
            h(
                "p",
                { class: "banner bad", id: "lost" },
                h("b", { role: "alert" }, `Connection lost: ${lost}. `),
                // Apart, so that it is not read aloud every second.
                h("span", {}, "What you see is ", h("b", {}, duration(ageMs())), " old; still trying."),
            ),
        hasStopped(app) &&
            h(
                "p",
                { class: "banner bad", id: "still" },
                h("b", { role: "alert" }, "The control loop has stopped. "),
                `Its last turn ended ${duration(ageMs())} ago.`,
            ),
        host?.paused &&
            h(
                "p",
                { class: "banner warn", id: "paused" },
                h("b", {}, "Paused. "),
                "VMs are traced, but nothing is moved until an operator resumes.",
            ),
        h(
            "div",
            { role: "status" },
            notice &&
                h(
                    "p",
                    { class: `banner ${notice.bad ? "bad" : "good"}`, id: "notice" },
                    notice.text,
                    " ",
                    h(
                        "button",
                        {
                            class: "close",
                            "aria-label": "Dismiss",
                            onclick: () => {
                                app.notice = null;
                                update();
                            },
                        },
                        "×",
                    ),
                ),
        ),
    );
}

function unlock(event) {
    event.preventDefault();
    keepToken(new FormData(event.target).get("token"));
    event.target.reset();
    askNow();
}

function waiting() {
    const { lost, locked } = app;
    if (locked) {
        return h(
            "form",
            { class: "empty", onsubmit: unlock },
            h("h1", {}, "A token, please"),
            h("p", {}, "This daemon requires its token. The token is kept for this tab only."),
            hasToken() && h("p", { role: "alert", id: "wrong-token" }, "The token that was given is not accepted."),
            h(
                "label",
                {},
                "Token ",
                h("input", { type: "password", name: "token", required: true, autocomplete: "off" }),
            ),
            h("button", { class: "strong" }, "Enter"),
        );
    }
    return h(
        "div",
        { class: "empty" },
        h("h1", {}, lost ? "No answer" : "Asking the daemon"),
        lost &&
            h("p", { role: "alert" }, `${lost[0].toUpperCase()}${lost.slice(1)}. Is plimsolld running? Still trying.`),
    );
}

function question() {
    const asked = app.question;
    const close = () => {
        app.question = null;
        update();
    };
    return h(
        "dialog",
        {
            class: "question",
            "aria-labelledby": "question-title",
            onpaint: (dialog) => {
                if (app.question && !dialog.open) dialog.showModal();
                if (!app.question && dialog.open) dialog.close();
                dialog.onclose = close;
            },
        },
        asked && [
            h("h2", { id: "question-title" }, asked.title),
            h("p", {}, asked.text),
            h(
                "p",
                { class: "buttons" },
                h("button", { class: "plain", onclick: close }, "Leave it"),
                h(
                    "button",
                    {
                        class: "strong",
                        onclick: () => {
                            close();
                            asked.run();
                        },
                    },
                    asked.verb,
                ),
            ),
        ],
    );
}

function draw() {
    const view = VIEWS[app.route.view];
    const ready = app.host && !app.locked;
    document.title = [app.route.view === "vm" ? app.route.name : view.title, app.host?.host, "Plimsoll"]
        .filter(Boolean)
        .join(" · ");
    morph(
        document.getElementById("app"),
        h(
            "div",
            { id: "app" },
            head(),
            banners(),
            h(
                "main",
                {
                    id: "main",
                    tabindex: -1,
                    key: `${app.route.view}/${app.route.name ?? ""}/${ready}`,
                    class: app.lost ? "aged" : null,
                },
                ready ? view.view() : waiting(),
            ),
            h("footer", { class: "foot" }, app.host && `plimsolld ${app.host.version} on ${app.host.host}`),
            question(),
        ),
    );
}

// Between two refreshes only ages change.
function tick() {
    morph(document.querySelector("#app > .head"), head());
    morph(document.querySelector("#app > .banners"), banners());
}

takeToken();
onUpdate(draw);
onWidth(update);
addEventListener("hashchange", () => {
    takeToken();
    readRoute();
});
onSystemTheme(update);
readRoute();
draw();
setInterval(tick, 1000);
begin();
