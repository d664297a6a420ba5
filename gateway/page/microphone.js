// Records the microphone to a file.

/** `button` starts and ends a recording. `onFile` receives the file, and `onProblem` messages for the user. */
export class Microphone {
  constructor(button, { onFile, onProblem }) {
    this.button = button;
    this.onFile = onFile;
    this.onProblem = onProblem;
    this.recorder = null;
    button.addEventListener("click", () => (this.recorder ? this.recorder.stop() : this.record()));
  }

  /** Show or hide the button. Browsers allow the microphone only on https and localhost. */
  show(isWanted) {
    this.button.hidden = !(isWanted && navigator.mediaDevices);
  }

  async record() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch {
      this.onProblem("The browser denies access to the microphone: allow it for this page, or add a file.");
      return;
    }
    const parts = [];
    this.recorder = new MediaRecorder(stream);
    this.recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
    this.recorder.addEventListener("stop", () => {
      const type = this.recorder.mimeType.split(";")[0];
      this.setRecorder(null);
      for (const track of stream.getTracks()) track.stop();
      this.onFile(new File(parts, "recording", { type }));
    });
    this.recorder.start();
    this.setRecorder(this.recorder);
  }

  setRecorder(recorder) {
    this.recorder = recorder;
    this.button.ariaPressed = String(recorder !== null);
    this.button.ariaLabel = this.button.title = recorder ? "End the recording" : "Record";
  }
}
