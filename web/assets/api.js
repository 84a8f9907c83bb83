// Asking the daemon. A token given as `#token=…` is kept for this tab alone and taken out of the address.

const TOKEN = "plimsoll-token";
const TIMEOUT_MS = 20_000;

/** The daemon answered, and said no. */
export class Refused extends Error {
    constructor(status, kind, message) {
        super(message);
        this.status = status;
        this.kind = kind;
    }
}

/** Moves a token from the address into the tab's storage. */
export function takeToken() {
    const match = /^#(?:.*&)?token=([^&]*)/.exec(location.hash);
    if (!match) return;
    try {
        keepToken(decodeURIComponent(match[1]));
    } catch {
        // No token can be read from it; the daemon will ask for one.
    }
    history.replaceState(null, "", location.pathname + location.search);
}

export const keepToken = (token) => sessionStorage.setItem(TOKEN, token);
export const hasToken = () => Boolean(sessionStorage.getItem(TOKEN));

/** The daemon's clock when it last answered; not a number if it did not say. */
export let answeredUnixMs = Number.NaN;

function headers(more = {}) {
    const token = sessionStorage.getItem(TOKEN);
    // No daemon accepts another one, and no browser sends it: without it the daemon asks for a token.
    return /^[\x21-\x7e]+$/.test(token ?? "") ? { ...more, Authorization: `Bearer ${token}` } : more;
}

async function refusal(response) {
    const said = await response.json().catch(() => null);
    return new Refused(
        response.status,
        said?.kind ?? "unknown",
        said?.message ?? `the daemon answered ${response.status}`,
    );
}

async function request(method, path, body, signal) {
    const limits = [AbortSignal.timeout(TIMEOUT_MS)];
    if (signal) limits.push(signal);
    const response = await fetch(path, {
        method,
        headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }),
        body: body === undefined ? undefined : JSON.stringify(body),
        signal: AbortSignal.any(limits),
        cache: "no-store",
    });
    answeredUnixMs = Date.parse(response.headers.get("date"));
    if (!response.ok) throw await refusal(response);
    const text = await response.text();
    return text ? JSON.parse(text) : null;
}

export const get = (path, signal) => request("GET", path, undefined, signal);
export const post = (path, body = {}) => request("POST", path, body);
export const patch = (path, body) => request("PATCH", path, body);

/** A path below a VM, whatever is in its name. */
export const vmPath = (vm, rest = "") => `/v1/vms/${encodeURIComponent(vm)}${rest}`;

const EVENT_CHARS_MAX = 65_536;

/**
 * Reads the daemon's events until the connection ends, handing each to `tell`.
 * By `fetch`, because an EventSource cannot send a token.
 */
export async function events(tell) {
    const response = await fetch("/v1/events", {
        headers: headers({ Accept: "text/event-stream" }),
        cache: "no-store",
    });
    if (!response.ok) throw await refusal(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        const parts = (rest + value).split(/\r?\n\r?\n/);
        rest = parts.pop();
        if (rest.length > EVENT_CHARS_MAX) throw new Error("an event without an end");
        for (const part of parts) {
            const data = part
                .split(/\r?\n/)
                .filter((line) => line.startsWith("data:"))
                .map((line) => line.slice(5).trimStart());
            if (data.length) tell(JSON.parse(data.join("\n")));
        }
    }
}
