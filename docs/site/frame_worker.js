/* A Worker for pages that are opened from a disk, where browsers start none: its script runs in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      const load = source => new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script")
        script.onload = resolve
        script.onerror = reject
        script.src = source
        frame.contentDocument.body.appendChild(script)
      })
      const hand = (target, data) => setTimeout(() => target.dispatchEvent(new MessageEvent("message", {data})))
      inside.postMessage = data => hand(this, data)
      inside.importScripts = (...sources) => sources.reduce((before, one) => before.then(() => load(one)), Promise.resolve())
      const ready = load(new URL(address, location.href).href)
      this.postMessage = data => { ready.then(() => hand(inside, data)) }
      this.terminate = () => frame.remove()
    }
  }
}
