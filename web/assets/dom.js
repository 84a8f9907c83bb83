// Elements as values: a view returns a fresh tree, and `morph` changes the page's tree into it, so that focus, scroll,
// open details and what somebody types outlive a refresh. Text is only ever set as text, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `on…` properties are handlers, `null`, `undefined` and `false` leave an attribute out. */
export function h(tag, attributes = {}, ...children) {
    return build(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes = {}, ...children) {
    return build(document.createElementNS(SVG, tag), attributes, children);
}

function build(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
        if (name.startsWith("on") || name === "key") {
            element[name] = value;
        } else if (name === "look") {
            // Through CSSOM, which the content security policy allows; an attribute it would not.
            for (const [property, to] of Object.entries(value)) element.style.setProperty(property, to);
        } else if (value === true) {
            element.setAttribute(name, "");
        } else if (value !== null && value !== undefined && value !== false) {
            element.setAttribute(name, value);
        }
    }
    append(element, children);
    return element;
}

/** What reorders or hides the text around it, as a VM's name may contain. */
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;
const shown = (text) => text.replace(CONTROLS, (control) => `\\u{${control.codePointAt(0).toString(16)}}`);

function append(element, children) {
    for (const child of children) {
        if (Array.isArray(child)) append(element, child);
        else if (child instanceof Node) element.append(child);
        else if (child !== null && child !== undefined && child !== false) element.append(shown(String(child)));
    }
}

// What a browser or its user changes by itself, and a refresh must not take back.
const THEIRS = { DETAILS: "open", DIALOG: "open" };
const HANDLERS = [
    "onclick",
    "oninput",
    "onchange",
    "onsubmit",
    "onkeydown",
    "onpointerdown",
    "onpointermove",
    "onpointerup",
    "onpointercancel",
    "onpointerenter",
    "onpointerleave",
    "onfocus",
    "onblur",
    "ontoggle",
    "onpaint",
];

/** Changes `old` into `fresh`. Children with a `key` are matched by it, the others by their place. */
export function morph(old, fresh) {
    if (old.nodeType === Node.TEXT_NODE) {
        if (old.data !== fresh.data) old.data = fresh.data;
        return;
    }
    // What somebody has entered and not yet sent stays.
    const entered = old.value !== old.defaultValue || old.checked !== old.defaultChecked;
    for (const { name } of [...old.attributes]) {
        const theirs = name === "style" || name === THEIRS[old.nodeName];
        if (!theirs && !fresh.hasAttribute(name)) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
        if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
    for (const name of HANDLERS) {
        if (old[name] !== fresh[name]) old[name] = fresh[name] ?? null;
    }
    if (fresh.nodeName === "INPUT" && !entered) {
        if (old.value !== fresh.value) old.value = fresh.value;
        if (old.checked !== fresh.checked) old.checked = fresh.checked;
    }
    children(old, fresh);
    old.onpaint?.(old);
}

function children(old, fresh) {
    const keyed = new Map();
    for (const child of old.childNodes) if (child.key !== undefined) keyed.set(child.key, child);
    let place = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
        let match = wanted.key === undefined ? place : keyed.get(wanted.key);
        if (!match || match.nodeName !== wanted.nodeName || match.key !== wanted.key) {
            old.insertBefore(wanted, place);
            painted(wanted);
            continue;
        }
        if (match === place) place = place.nextSibling;
        else old.insertBefore(match, place);
        morph(match, wanted);
    }
    while (place) {
        const next = place.nextSibling;
        place.remove();
        place = next;
    }
}

function painted(node) {
    if (node.nodeType !== Node.ELEMENT_NODE) return;
    node.onpaint?.(node);
    for (const child of node.children) painted(child);
}
