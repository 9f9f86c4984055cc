// Sessions, and the graph of one of them as it moves.
"use strict"

import { byId, count, counted, element, setText } from "./dom.js"
import { headers } from "./server.js"

const PAUSE_MS = 600 // between two pictures of a graph in which something runs
const IDLE_PAUSE_MS = 3000 // of another one: what runs and ends between two events of sessions leaves their numbers alone

export class Sessions {
  #sessions = []
  #chosen = null
  #drawn = ""
  #timer = 0
  #asking = false

  constructor() {
    const anchor = decodeURIComponent(location.hash.slice(1))
    this.#chosen = anchor || null
    document.addEventListener("visibilitychange", () => document.hidden || this.#look())
  }

  /** The event `sessions`. */
  apply(sessions) {
    this.#sessions = sessions
    if (!sessions.some(session => session.session_id === this.#chosen)) {
      this.#chosen = (sessions.find(session => session.started) ?? sessions[0])?.session_id ?? null
    }
    setText(byId("sessions-count"), sessions.length ? counted(sessions.length, "session") : "")
    byId("no-sessions").hidden = sessions.length > 0
    this.#list()
    this.#look()
  }

  #list() {
    byId("session-list").replaceChildren(...this.#sessions.map(session => {
      const words = `${counted(session.calls, "call")}${session.started ? `, ${count(session.started)} at work` : ""}`
      const button = element("button", {
        type: "button", class: "chip", "aria-pressed": String(session.session_id === this.#chosen),
        "data-working": session.started ? "yes" : null,
      }, element("b", {}, session.session_id), element("span", { class: "muted" }, words))
      button.addEventListener("click", () => {
        this.#chosen = session.session_id
        history.replaceState(null, "", "#" + encodeURIComponent(session.session_id))
        this.#list()
        this.#look()
      })
      return button
    }))
  }

  /** Draw the chosen graph, and again for as long as the page is seen: soon if something in it runs. */
  async #look() {
    clearTimeout(this.#timer)
    if (this.#asking) return
    const chosen = this.#sessions.find(session => session.session_id === this.#chosen)
    if (!chosen) {
      byId("graph").hidden = true
      this.#drawn = ""
      return
    }
    this.#asking = true
    try {
      const picture = await askPicture(`v1/session/${encodeURIComponent(chosen.session_id)}/graph.svg`)
      if (picture) this.#show(picture, chosen)
    } finally {
      this.#asking = false
    }
    if (chosen.session_id !== this.#chosen) this.#look()
    else if (!document.hidden) this.#timer = setTimeout(() => this.#look(), chosen.started ? PAUSE_MS : IDLE_PAUSE_MS)
  }

  #show({ text, root }, session) {
    const graph = byId("graph")
    graph.hidden = session.calls === 0
    if (text === this.#drawn) return
    this.#drawn = text
    const picture = document.importNode(root, true)
    const [, , width, height] = picture.getAttribute("viewBox").split(" ")
    picture.setAttribute("width", width)
    picture.setAttribute("height", height)
    graph.replaceChildren(picture)
  }
}

/** A picture as elements, parsed as XML by the browser's own client: no text is ever parsed as HTML. null: none came. */
function askPicture(path) {
  return new Promise(resolve => {
    const request = new XMLHttpRequest()
    request.open("GET", path)
    request.responseType = "document"
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value)
    request.onloadend = () => {
      const root = request.status === 200 ? request.responseXML?.documentElement : null
      resolve(root ? { root, text: new XMLSerializer().serializeToString(root) } : null)
    }
    request.send()
  })
}
