// Elements, made without HTML: every text becomes a text node, so that none can become code.
"use strict"

const SVG = "http://www.w3.org/2000/svg"

/** The element with an id. */
export const byId = id => document.getElementById(id)

/** A new HTML element. Children are elements or texts; empty ones (null) are left out. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children)
}

/** A new SVG element. */
export function svgElement(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children)
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(name, value)
  }
  made.append(...children.filter(child => child !== null))
  return made
}

/** Sets a text, and leaves the page alone if it is there already. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text
}

/** Shows a text in an element that is hidden without one. */
export function showMessage(target, text) {
  setText(target, text)
  target.hidden = !text
}

const whole = new Intl.NumberFormat("en")

/** A number with its thousands apart. */
export const count = number => whole.format(Math.round(number))

/** "1 page", "2 pages". */
export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`

/** The first characters of an id, which tell contexts apart for people. */
export const shortId = id => (id.length > 12 ? id.replace(/^ctx_/, "").slice(0, 8) : id)
