import { useState } from "preact/hooks";

/** Copies a text, and says so. */
export function CopyButton(props: { text: string; what: string }) {
  const [done, setDone] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(props.text);
      setDone("Copied");
    } catch {
      setDone("Cannot copy here: select the text");
    }
    setTimeout(() => setDone(""), 2000);
  };
  return (
    <button type="button" class="button" onClick={copy} aria-label={`Copy ${props.what}`}>
      <span aria-live="polite">{done || "Copy"}</span>
    </button>
  );
}
