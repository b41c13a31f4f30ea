import { useId, useMemo } from "preact/hooks";
import { clock, TimeChart, type Line, type Timeline } from "./chart";
import { roundAbove, spike } from "./columns";
import type { Sample } from "./stream";

/** A line of a card, with the figure that stands above the chart and is its legend at once. */
export interface Shown extends Line {
  /** The figure, where it is not what the line draws: a stacked line draws a sum. */
  value?: (sample: Sample) => number | null | undefined;
  big?: boolean;
  /** Has no figure: a table beside the charts names it. */
  unnamed?: boolean;
}

/** A chart under its figures: those of the moment under the cursor, else of now. */
export function ChartCard(props: {
  title: string;
  hint: string;
  lines: Shown[];
  moment: Sample | null;
  timeline: Timeline;
  axisText: (value: number) => string;
  least: number;
  most?: number;
}) {
  const { lines, moment } = props;
  const id = useId();
  const shown = lines.filter((line) => line.style !== "bound" && !line.unnamed);
  const drawn = useMemo(() => lines.filter((line) => line.style !== "figure"), [lines]);
  const band = lines.some((line) => line.style === "bound") && lines.find((line) => line.style === "dashed");
  const { rows } = props.timeline;
  const reads = drawn.filter((line) => line.style !== "bound").map((line) => line.read);
  const clipped = useMemo(() => (props.most === undefined ? spike(rows, reads) : null), [rows, drawn]);
  return (
    <section class="card live-card" aria-labelledby={id}>
      <h2 id={id}>
        {props.title} <span class="quiet small">{props.hint}</span>
        {band && (
          <span class="band quiet small">
            <BandSwatch /> 9 in 10 of {band.label}
          </span>
        )}
      </h2>
      <dl class="figures">
        {shown.map((line) => (
          <Figure key={line.label} line={line} moment={moment} />
        ))}
      </dl>
      <p class="peak quiet small">
        {clipped && `▲ up to ${shown[0]!.text(clipped.peak.value)} at ${clock.format(clipped.peak.time * 1000)}`}
      </p>
      <TimeChart
        label={`${props.title}: ${drawn.map((line) => line.label).join(", ")}`}
        height={168}
        lines={drawn}
        timeline={props.timeline}
        axisText={props.axisText}
        least={props.least}
        most={clipped ? roundAbove(clipped.usual, props.least) : props.most}
      />
    </section>
  );
}

export function Figure(props: { line: Shown; moment: Sample | null }) {
  const { line, moment } = props;
  const value = moment === null ? null : (line.value ?? line.read)(moment);
  return (
    <div class={line.big ? "figure big" : "figure"}>
      <dt>
        <Swatch line={line} />
        {line.label}
      </dt>
      <dd>
        {value === null || value === undefined ? (
          <span class="none">–</span>
        ) : (
          <Amount text={line.text(value)} />
        )}
      </dd>
    </div>
  );
}

/** A number and, smaller, its unit: `5.6 ms`. */
export function Amount(props: { text: string }) {
  const [value, ...unit] = props.text.split(" ");
  return (
    <>
      {value} {unit.length > 0 && <span class="unit">{unit.join(" ")}</span>}
    </>
  );
}

/** The mark of a line in a legend, in the line's own form. SVG attributes, since the page allows no inline styles. */
export function Swatch(props: { line: Pick<Line, "color" | "style"> }) {
  const { color, style } = props.line;
  if (style === "figure") return null;
  return (
    <svg class="swatch" viewBox="0 0 14 10" width="14" height="10" aria-hidden="true">
      {style === "area" ? (
        <rect width="10" height="10" x="2" rx="2" fill={`var(--${color})`} />
      ) : (
        <line x1="0" x2="14" y1="5" y2="5" stroke={`var(--${color})`} stroke-width="2.5" stroke-dasharray={style === "dashed" ? "4 3" : undefined} />
      )}
    </svg>
  );
}

/** The shade between the two edges of a band. */
function BandSwatch() {
  return (
    <svg class="swatch" viewBox="0 0 14 10" width="14" height="10" aria-hidden="true">
      <rect width="14" height="10" rx="2" fill="var(--ink-2)" fill-opacity="0.22" />
      <line x1="0" x2="14" y1="5" y2="5" stroke="var(--ink-2)" stroke-width="1.5" stroke-dasharray="4 3" />
    </svg>
  );
}
