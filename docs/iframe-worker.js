/* Search in pages that are opened as files, where browsers start no workers: the script of the search runs
   in a hidden frame instead. The theme would load such a script from another site. */
if (location.protocol === "file:") {
  const load = (page, url) =>
    new Promise((done, failed) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = done;
      script.onerror = failed;
      page.head.append(script);
    });

  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      const opened = new Promise((done) => (frame.onload = done));
      frame.srcdoc = "<!doctype html><title>search</title>";
      document.body.append(frame);
      this.ready = opened.then(() => {
        const inside = frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = (...urls) => Promise.all(urls.map((one) => load(inside.document, one)));
        return load(inside.document, url).then(() => inside);
      });
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
