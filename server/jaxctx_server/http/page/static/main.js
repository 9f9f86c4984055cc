// The page: one stream of events while it is seen, and what shows them.
"use strict"

import { byId, setText, showMessage } from "./dom.js"
import { Load } from "./load.js"
import { Contexts } from "./pages.js"
import { Prompt } from "./prompt.js"
import { events, savedKey, saveKey } from "./server.js"
import { Sessions } from "./sessions.js"
import { Tree } from "./tree.js"

const FIRST_PAUSE_MS = 500, LONGEST_PAUSE_MS = 8000 // before another connection

const contexts = new Contexts()
const prompt = new Prompt(contexts)
const tree = new Tree(contexts, prompt.detail)
prompt.attach(tree)
const load = new Load(contexts)
const sessions = new Sessions()
let connection = null // AbortController of the stream
let pause = FIRST_PAUSE_MS
let seesEngines = true

const handlers = {
  hello(data) {
    seesEngines = data.sees_engines
    setText(byId("model"), data.models.join(", "))
    if (!seesEngines) load.apply(null)
  },
  contexts(data) {
    contexts.apply(data)
    redraw()
  },
  pages(data) {
    contexts.applyPages(data)
    redraw()
  },
  engines: data => load.apply(data),
  sessions: data => sessions.apply(data),
}

function redraw() {
  tree.draw()
  prompt.update()
  if (!seesEngines) load.draw()
}

async function connect() {
  if (connection || document.hidden) return
  const own = connection = new AbortController()
  const needsKey = document.documentElement.dataset.needsKey === "yes"
  byId("key-form").hidden = !needsKey
  if (needsKey && !savedKey()) {
    connection = null
    showState("waiting", "Needs a key")
    return
  }
  try {
    for await (const { type, data } of events("page/events", { signal: own.signal })) {
      pause = FIRST_PAUSE_MS
      showState("live", "Live")
      showMessage(byId("notice"), "")
      handlers[type]?.(data)
    }
    throw new Error("the server closed the stream")
  } catch (error) {
    if (error.name === "AbortError") return
    explain(error)
  } finally {
    load.forget()
    if (connection === own) connection = null
  }
  setTimeout(connect, pause)
  pause = Math.min(2 * pause, LONGEST_PAUSE_MS)
}

function explain(error) {
  if (error.status === 401 || error.status === 403) {
    pause = LONGEST_PAUSE_MS
    byId("key-form").hidden = false
    showState("lost", "Key refused")
    return
  }
  showState("lost", error.status === 503 ? "Not ready" : "Reconnecting")
  showMessage(byId("notice"), error instanceof TypeError ? "The server does not answer. Trying again …" : error.message)
}

function showState(state, words) {
  byId("status").dataset.state = state
  setText(byId("status").lastElementChild, words)
}

/** End the stream: nothing is asked or sent while nobody looks. */
function disconnect() {
  connection?.abort()
  connection = null
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) disconnect()
  else connect()
})
byId("key").value = savedKey()
byId("key-form").addEventListener("submit", event => {
  event.preventDefault()
  saveKey(byId("key").value.trim())
  disconnect()
  pause = FIRST_PAUSE_MS
  connect()
})

const base = new URL(".", location.href).href
const json = "-H 'content-type: application/json'"
setText(byId("curl-prompt"), `curl ${base}page/prompt ${json} \\\n  -d '{"text": "def fibonacci(n):", "branches": 3, "max_tokens": 32}'`)
setText(byId("curl-session"), `curl ${base}v1/session ${json} -d '{"session_id": "mine"}'`)
connect()
