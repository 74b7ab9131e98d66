/* On pages that are opened from disk browsers refuse workers, which the search is one of: a hidden frame does its work. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const base = new URL(url, location.href)
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      this.frame = frame.contentWindow
      const tell = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      const load = source => new Promise((done, failed) => {
        const script = this.frame.document.createElement("script")
        Object.assign(script, { src: new URL(source, base).href, onload: done, onerror: failed })
        this.frame.document.documentElement.append(script)
      })
      this.frame.post = this.frame.postMessage.bind(this.frame)
      this.frame.postMessage = tell
      this.frame.importScripts = (...sources) => sources.reduce((before, next) => before.then(() => load(next)), Promise.resolve())
      this.ready = load(base)
    }
    postMessage(data) { this.ready.then(() => this.frame.post(data, "*")) }
    terminate() {}
  }
}
