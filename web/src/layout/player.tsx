import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Select } from "../ui/field";

const STEP_MS = 1800;

/** Steps through the stages: by buttons, by arrow keys, or on its own. */
export function Player(props: { steps: number; step: number | null; goTo: (step: number | null) => void }) {
  const { steps, step, goTo } = props;
  const [speed, setSpeed] = useState("1");
  const [plays, setPlays] = useState(false);
  const last = steps - 1;
  const move = (by: number) => goTo(step === null ? (by > 0 ? 0 : last) : Math.max(0, Math.min(last, step + by)));
  const toggle = () => {
    if (!plays && (step === null || step === last)) goTo(0);
    setPlays(!plays);
  };
  const latest = useRef({ move, toggle });
  latest.current = { move, toggle };

  useEffect(() => {
    if (!plays) return;
    if (step === last) return setPlays(false);
    const timer = setTimeout(() => latest.current.move(1), STEP_MS / Number(speed));
    return () => clearTimeout(timer);
  }, [plays, step, speed, last]);

  // With the first picture, not after it is painted: a key pressed at once must count.
  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.altKey || event.ctrlKey || event.metaKey || target.matches("input, select, textarea")) return;
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by === undefined && !(event.key === " " && !target.matches("button, a, summary"))) return;
      event.preventDefault();
      if (by === undefined) return latest.current.toggle();
      setPlays(false);
      latest.current.move(by);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);

  const stepTo = (by: number) => {
    setPlays(false);
    move(by);
  };
  return (
    <div class="player">
      <button type="button" class="button" disabled={step === 0} onClick={() => stepTo(-1)}>
        Back
      </button>
      <button type="button" class="button primary" aria-pressed={plays} onClick={toggle}>
        {plays ? "Pause" : "Play"}
      </button>
      <button type="button" class="button" disabled={step === last} onClick={() => stepTo(1)}>
        Next
      </button>
      <Select
        label="Speed"
        value={speed}
        options={[
          ["0.5", "½ ×"],
          ["1", "1 ×"],
          ["2", "2 ×"],
          ["4", "4 ×"],
        ]}
        onChange={setSpeed}
      />
    </div>
  );
}
