import { useEffect, useMemo, useState } from "preact/hooks";
import "../styles/live.css";
import type { About } from "../session";
import { ChartCard } from "./card";
import {
  axisCount,
  millis,
  axisPercent,
  firstTokenLines,
  gapLines,
  memoryLines,
  outputLines,
  promptLines,
  requestLines,
} from "./cards";
import { clock, pointAt, type Timeline } from "./chart";
import { outages, withHoles } from "./columns";
import { Gpus } from "./gpus";
import { Ranks } from "./ranks";
import { Status } from "./status";
import { Findings } from "../trace/findings";
import "../styles/trace.css";
import { ofTab } from "../storage";
import { useLive, type Sample } from "./stream";

const MINUTES = [1, 5, 15, 60];
const USUAL = 15;
const CHOSEN = "phalanx.live.minutes";

/** What the engine does now and did in the last minutes. */
export function LiveView(props: { server: About }) {
  const [minutes, setMinutes] = useState(() => Number(ofTab.get(CHOSEN)) || USUAL);
  const { link, state, samples: known } = useLive(60 * minutes);
  const samples = useMemo(() => lastOf(known, 60 * minutes), [known, minutes]);
  const choose = (chosen: number) => {
    setMinutes(chosen);
    ofTab.set(CHOSEN, String(chosen));
  };
  const [cursor, setCursor] = useState<number | null>(null);
  const rows = useMemo(() => withHoles(samples), [samples]);
  const [pinned, setPinned] = useState<number | null>(null);
  const timeline: Timeline = useMemo(
    () => ({ seconds: 60 * minutes, rows, outages: outages(samples), onCursor: setCursor }),
    [rows],
  );
  useEffect(() => {
    if (pinned !== null) pointAt(pinned);
  }, [rows, pinned]);
  const shown = pinned === null ? cursor : rows.findIndex((row) => typeof row !== "number" && row.t === pinned);
  const pin = (time: number | null) => {
    setPinned(time);
    if (time === null) pointAt(null);
  };
  /** A hand on a chart takes over from the slider. */
  const touched = (event: Event) => {
    if (event.target instanceof Element && event.target.closest(".u-over")) setPinned(null);
  };
  const pointed = shown === null ? undefined : rows[shown];
  const isPast = pointed !== undefined && typeof pointed !== "number";
  const moment = isPast ? pointed : (samples[samples.length - 1] ?? null);
  const kind = state?.expected?.kind ?? "plan";
  const drafts = samples.some((sample) => sample.accepted !== null);
  const output = useMemo(() => outputLines(kind, drafts), [kind, drafts]);
  const gaps = useMemo(() => gapLines(kind), [kind]);
  const tp = props.server.tp ?? 1;
  const shared = { moment, timeline };
  return (
    <div class="live" onPointerMove={touched}>
      <Status link={link} state={state} tp={tp} />
      {state !== null && state.notes.length > 0 && (
        <section class="card small" aria-label="Findings">
          <Findings findings={state.notes} />
        </section>
      )}
      <div class="live-time">
        <Range minutes={minutes} choose={choose} />
        <Moment rows={rows} shown={isPast ? shown : null} isLost={link === "lost"} pin={pin} />
      </div>
      <div class="live-cards">
        <ChartCard title="Output" hint="tokens a second" lines={output} least={10} axisText={axisCount} {...shared} />
        <ChartCard title="Time to first token" hint="last 10 s" lines={firstTokenLines} least={10} axisText={millis} {...shared} />
        <ChartCard title="Time between tokens" hint="last 10 s" lines={gaps} least={5} axisText={millis} {...shared} />
        <ChartCard title="Prompts" hint="tokens a second" lines={promptLines} least={10} axisText={axisCount} {...shared} />
        <ChartCard title="Requests" hint="mean of a second" lines={requestLines} least={4} axisText={axisCount} {...shared} />
        <ChartCard title="KV cache" hint="share of blocks" lines={memoryLines} least={0.1} most={1} axisText={axisPercent} {...shared} />
      </div>
      <Gpus gpus={state?.gpus ?? []} {...shared} />
      <Ranks count={tp} state={state} lost={link === "lost"} samples={samples} {...shared} />
      <Notes samples={samples} minutes={minutes} kind={kind} source={state?.expected?.source} viewers={state?.viewers ?? 1} />
    </div>
  );
}

function lastOf(samples: Sample[], seconds: number): Sample[] {
  const from = (samples.at(-1)?.t ?? 0) - seconds;
  return samples.filter((sample) => sample.t > from);
}

/** How far back the view reaches. */
function Range(props: { minutes: number; choose: (minutes: number) => void }) {
  return (
    <fieldset class="live-range">
      <legend class="hidden-label">Minutes shown</legend>
      {MINUTES.map((each) => (
        <label key={each}>
          <input
            type="radio"
            name="live-range"
            value={each}
            checked={each === props.minutes}
            onChange={() => props.choose(each)}
          />
          {each} min
        </label>
      ))}
    </fieldset>
  );
}

type Pin = (time: number | null) => void;

/** The moment whose figures are shown. The slider does for the keyboard and the thumb what hovering does for a mouse. */
function Moment(props: { rows: (Sample | number)[]; shown: number | null; isLost: boolean; pin: Pin }) {
  const { rows, shown } = props;
  const last = Math.max(rows.length - 1, 0);
  const at = shown === null ? undefined : rows[shown];
  const text = at === undefined || typeof at === "number" ? (props.isLost ? "last seen" : "now") : clock.format(at.t * 1000);
  const move = (index: number) => {
    const row = rows[index];
    const time = row === undefined ? null : typeof row === "number" ? row : row.t;
    props.pin(index >= last ? null : time);
  };
  return (
    <div class="live-moment">
      <label for="live-moment">Figures of</label>
      <output for="live-moment" class={shown === null ? "now" : "past"}>
        {text}
      </output>
      <input
        id="live-moment"
        type="range"
        min={0}
        max={last}
        value={shown ?? last}
        aria-valuetext={text}
        onInput={(event) => move(Number(event.currentTarget.value))}
      />
      <button type="button" class="button" disabled={shown === null} onClick={() => props.pin(null)}>
        Back to now
      </button>
    </div>
  );
}

/** What the lines are held against, and what seldom happens. */
function Notes(props: { samples: Sample[]; minutes: number; kind: string; source: string | undefined; viewers: number }) {
  const preemptions = props.samples.reduce((sum, sample) => sum + sample.preemptions, 0);
  const title = props.kind === "plan" ? "Plan" : "Baseline";
  return (
    <section class="card live-notes small" aria-label="Notes">
      <p>
        <strong>{title}.</strong>{" "}
        {props.source ?? "Known once the engine is ready."}
      </p>
      <p>
        <strong>Preemptions.</strong> {preemptions === 0 ? "None" : preemptions.toLocaleString("en-US")} in the last{" "}
        {props.minutes === 1 ? "minute" : `${props.minutes} minutes`}
        {preemptions === 0 ? "." : ": requests were put back because KV blocks ran out. More KV memory or fewer requests at once would help."}
      </p>
      <p class="quiet">
        {props.viewers === 1 ? "One view of this page is open." : `${props.viewers} views of this page are open.`}
      </p>
    </section>
  );
}
