// Calls of this server: with the key of the user, as JSON, and streams of server-sent events.
"use strict"

const KEY = "key_of_jaxctx"

export const savedKey = () => sessionStorage.getItem(KEY) ?? ""
export const saveKey = key => sessionStorage.setItem(KEY, key)

/** Headers of every call. */
export function headers(body) {
  const made = {}
  if (savedKey()) made.authorization = "Bearer " + savedKey()
  if (body !== undefined) made["content-type"] = "application/json"
  return made
}

/** An error that the server returned: `status` is that of HTTP, `field` the field that was wrong. */
export class ServerError extends Error {
  constructor(error, status) {
    super(error.param ? `${error.param}: ${error.message}` : error.message)
    this.status = status
    this.code = error.code
  }
}

async function call(path, { method = "GET", body, signal } = {}) {
  const response = await fetch(path, {
    method, signal, cache: "no-store", headers: headers(body), body: body === undefined ? undefined : JSON.stringify(body),
  })
  if (response.ok) return response
  let error = { message: `the server answered ${response.status}` }
  try {
    error = (await response.json()).error
  } catch {
    // a proxy's answer: the status says enough
  }
  throw new ServerError(error, response.status)
}

/** The JSON of an answer. */
export async function ask(path, options) {
  return (await call(path, options)).json()
}

/** The events of a stream, as { type, data }. Raises ServerError for an event of type `error`. */
export async function* events(path, options) {
  const response = await call(path, options)
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  let waiting = ""
  try {
    for (;;) {
      const { done, value } = await reader.read()
      if (done) return
      const parts = (waiting + value).split("\n\n")
      waiting = parts.pop()
      for (const part of parts) {
        const event = parsed(part)
        if (event === null) continue
        if (event.type === "error") throw new ServerError(event.data.error, 0)
        yield event
      }
    }
  } finally {
    reader.cancel().catch(() => {})
  }
}

function parsed(text) {
  let type = "message", data = ""
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) type = line.slice(7)
    else if (line.startsWith("data: ")) data += line.slice(6)
  }
  return data ? { type, data: JSON.parse(data) } : null
}
