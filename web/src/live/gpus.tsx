import { useMemo } from "preact/hooks";
import { number } from "../format";
import { ChartCard, Swatch, type Shown } from "./card";
import type { Timeline } from "./chart";
import type { Gpu, Sample } from "./stream";

const COLORS = ["series-1", "series-2", "series-3", "series-4", "series-5", "series-6"];

const gibibytes = (value: number) => `${number(value)} GiB`;
const watts = (value: number) => `${number(value)} W`;
const degrees = (value: number) => `${number(value)} °C`;

interface Kind {
  title: string;
  hint: string;
  big: string;
  index: 0 | 1 | 2;
  least: number;
  text: (value: number) => string;
  /** What is told large, of all GPUs. */
  of: (values: number[]) => number;
}

const KINDS: Kind[] = [
  { title: "GPU memory", hint: "in use", big: "fullest", index: 0, least: 1, text: gibibytes, of: (all) => Math.max(...all) },
  { title: "GPU power", hint: "drawn", big: "together", index: 1, least: 50, text: watts, of: (all) => all.reduce((a, b) => a + b) },
  { title: "GPU temperature", hint: "of the chip", big: "hottest", index: 2, least: 50, text: degrees, of: (all) => Math.max(...all) },
];

/** Memory, power and temperature of the GPUs of the server's machine, where its driver tells them. */
export function Gpus(props: { gpus: Gpu[]; moment: Sample | null; timeline: Timeline }) {
  const { gpus, moment } = props;
  if (!gpus.length) return null;
  return (
    <>
      <div class="live-cards">
        {KINDS.map((kind) => (
          <GpuChart key={`${kind.title} ${gpus.length}`} kind={kind} count={gpus.length} moment={moment} timeline={props.timeline} />
        ))}
      </div>
      <section class="card live-gpus" aria-labelledby="live-gpus">
        <h2 id="live-gpus">GPUs</h2>
        <div class="table-scroll" tabIndex={0} role="group" aria-label="GPUs">
          <table>
            <thead>
              <tr>
                <th scope="col">GPU</th>
                <th scope="col">Memory</th>
                <th scope="col">Power</th>
                <th scope="col">Temperature</th>
              </tr>
            </thead>
            <tbody>
              {gpus.map((gpu, at) => (
                <Row key={gpu.gpu} gpu={gpu} line={lineOf(at)} now={moment?.gpus[at]} />
              ))}
            </tbody>
          </table>
        </div>
      </section>
    </>
  );
}

/** How a GPU is drawn; beyond the colours there are, dashed. */
const lineOf = (at: number) => ({
  color: COLORS[at % COLORS.length]!,
  style: at < COLORS.length ? ("line" as const) : ("dashed" as const),
});

function Row(props: { gpu: Gpu; line: ReturnType<typeof lineOf>; now: Sample["gpus"][number] | undefined }) {
  const { gpu } = props;
  const [memory, power, heat] = props.now ?? [null, null, null];
  const told = (value: number | null, text: (value: number) => string, most: number | null = null) =>
    value === null ? "–" : most === null ? text(value) : `${number(value)} of ${text(most)}`;
  return (
    <tr>
      <th scope="row">
        <Swatch line={props.line} /> {gpu.gpu} <span class="quiet">{gpu.name}</span>
      </th>
      <td>{told(memory, gibibytes, gpu.memory)}</td>
      <td>{told(power, watts, gpu.watts_limit)}</td>
      <td>{told(heat, degrees)}</td>
    </tr>
  );
}

function GpuChart(props: { kind: Kind; count: number; moment: Sample | null; timeline: Timeline }) {
  const { kind, count } = props;
  const lines = useMemo((): Shown[] => {
    const read = (at: number) => (sample: Sample) => sample.gpus[at]?.[kind.index];
    const all = (sample: Sample) => {
      const told = sample.gpus.flatMap((gpu) => gpu[kind.index] ?? []);
      return told.length ? kind.of(told) : null;
    };
    return [
      { label: kind.big, color: "ink-2", read: all, text: kind.text, style: "figure", big: true },
      ...Array.from({ length: count }, (_, at): Shown => ({
        ...{ label: `GPU ${at}`, read: read(at), text: kind.text, unnamed: true },
        ...lineOf(at),
      })),
    ];
  }, [count]);
  return (
    <ChartCard
      {...{ title: kind.title, hint: kind.hint, lines, least: kind.least, axisText: kind.text }}
      moment={props.moment}
      timeline={props.timeline}
    />
  );
}
