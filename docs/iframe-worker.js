// Search in pages that were opened from a folder. A browser starts no worker for file:// pages, so
// here the worker's script runs in a hidden frame, with the two functions that it uses.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)));
      this.ready = this.load(url);
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script");
        Object.assign(script, { src: url, onload: done, onerror: failed });
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      const event = new this.inside.MessageEvent("message", { data });
      this.ready.then(() => this.inside.dispatchEvent(event));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
