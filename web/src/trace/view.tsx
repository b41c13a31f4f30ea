import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "../api";
import { millis, number, percent } from "../format";
import "../styles/trace.css";
import { stepSlices, takeTrace, type Summary, type Trace } from "./data";
import { Findings } from "./findings";
import { Timeline } from "./timeline";

/** Some steps of the engine, over all ranks. */
export function TraceView() {
  const [steps, setSteps] = useState(8);
  const [trace, setTrace] = useState<Trace | null>(null);
  const [told, setTold] = useState("Follows the next steps of the engine. It needs requests that run meanwhile.");
  const [busy, setBusy] = useState(false);
  const stop = useRef(new AbortController());
  useEffect(() => () => stop.current.abort(), []);
  const take = async () => {
    setBusy(true);
    setTold("Tracing. Without requests it gives up after 20 s.");
    try {
      const taken = await takeTrace(steps, stop.current.signal);
      setTrace(taken);
      setTold(stepSlices(taken).length ? "" : "No step ran meanwhile: ask it something, then trace again.");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setTold(error.message);
    } finally {
      setBusy(false);
    }
  };
  const full = trace !== null && stepSlices(trace).length > 0;
  return (
    <div class="trace">
      <section class="card trace-ask" aria-label="Take a trace">
        <label for="trace-steps">Steps</label>
        <select id="trace-steps" value={steps} onChange={(event) => setSteps(Number(event.currentTarget.value))}>
          {[4, 8, 16, 32].map((count) => (
            <option key={count}>{count}</option>
          ))}
        </select>
        <button type="button" class="button" disabled={busy} onClick={take}>
          Trace
        </button>
        {full && <Download file={trace.file} />}
        <p role="status">{told}</p>
      </section>
      {full && <Shown trace={trace} />}
    </div>
  );
}

function Shown(props: { trace: Trace }) {
  const { trace } = props;
  const names = [...new Set(stepSlices(trace).map((slice) => slice.name))];
  const [index, setIndex] = useState(names.length - 1);
  const step = names[Math.min(index, names.length - 1)]!;
  return (
    <>
      {trace.findings.length > 0 && (
        <section class="card" aria-label="Findings">
          <Findings findings={trace.findings} />
        </section>
      )}
      {trace.summaries.map((summary) => (
        <Parts key={summary.kind} summary={summary} />
      ))}
      <section class="card" aria-label="Timeline">
        <div class="trace-pick">
          <label for="trace-step">Step</label>
          <input
            id="trace-step"
            type="range"
            min={0}
            max={names.length - 1}
            value={index}
            aria-valuetext={step}
            onInput={(event) => setIndex(Number(event.currentTarget.value))}
          />
          <output for="trace-step">{step}</output>
        </div>
        <div class="trace-scroll" tabIndex={0} role="region" aria-label="Timeline of the step">
          <Timeline trace={trace} step={step} />
        </div>
        <p class="small quiet trace-key">
          {["mixer", "ffn", "other", "call", "wait", "exchange"].map((tone) => (
            <span key={tone} class={tone}>
              {KEYS[tone]}
            </span>
          ))}
        </p>
      </section>
    </>
  );
}

const KEYS: Record<string, string> = {
  mixer: "attention",
  ffn: "FFN, experts",
  other: "other parts",
  call: "collective",
  wait: "waits for a rank",
  exchange: "exchange",
};

function Parts(props: { summary: Summary }) {
  const { summary } = props;
  return (
    <section class="card" aria-label={`Parts of ${summary.kind} steps`}>
      <table class="trace-parts">
        <caption>
          {summary.steps} {summary.kind} steps of {millis(summary.period)}
          {summary.call_bytes > 0 && `; ${summary.calls} collectives, ${number(summary.call_bytes / 1024)} KiB a rank`}
        </caption>
        <thead>
          <tr>
            <th scope="col">part</th>
            <th scope="col">ms a step</th>
            <th scope="col">of it</th>
            <th scope="col">most</th>
          </tr>
        </thead>
        <tbody>
          {summary.parts
            .filter((part) => part.mean >= 0.0005)
            .map((part) => (
              <tr key={part.name}>
                <th scope="row">{part.name}</th>
                <td>{number(part.mean)}</td>
                <td>{percent(part.mean / summary.period)}</td>
                <td>
                  {number(part.most)}
                  {part.rank !== null && ` on rank ${part.rank}`}
                </td>
              </tr>
            ))}
        </tbody>
      </table>
    </section>
  );
}

/** A file that ui.perfetto.dev opens. */
function Download(props: { file: string }) {
  const [href, setHref] = useState("");
  useEffect(() => {
    const made = URL.createObjectURL(new Blob([props.file], { type: "application/json" }));
    setHref(made);
    return () => URL.revokeObjectURL(made);
  }, [props.file]);
  return (
    <a class="button" href={href} download="phalanx-trace.json">
      Save for Perfetto
    </a>
  );
}
