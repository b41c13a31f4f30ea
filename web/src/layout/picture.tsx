import { useEffect, useRef, useState } from "preact/hooks";
import type { Dealt, Split } from "./data";
import { activations, columnsOf, columnsResult, kindOf, mixerHeads, type Stage } from "./stages";
import { bytes, plural, seconds, shape, span } from "./units";

const MOST_EXPERTS = 64;
const MOST_NUMBERED = 16;

/** How many ranks fit side by side here. */
function useColumns(tp: number) {
  const place = useRef<HTMLDivElement>(null);
  const [fit, setFit] = useState(4);
  useEffect(() => {
    const sized = new ResizeObserver(([entry]) => {
      const width = entry!.contentRect.width;
      setFit(width < 560 ? 2 : width < 760 ? 3 : 4);
    });
    sized.observe(place.current!);
    return () => sized.disconnect();
  }, []);
  return { place, columns: Math.min(fit, tp) };
}

/** One decoder layer: a rank and its neighbours side by side, the stages from top to bottom. */
export function Picture(props: {
  split: Split;
  stages: Stage[];
  step: number | null;
  rank: number;
  goTo: (step: number) => void;
  choose: (rank: number) => void;
}) {
  const { split, stages, step, rank } = props;
  const { place, columns } = useColumns(split.tp);
  const first = Math.max(0, Math.min(rank - Math.floor((columns - 1) / 2), split.tp - columns));
  const shown = Array.from({ length: columns }, (_, index) => first + index);
  const drawn = useRef(step);
  useEffect(() => {
    if (drawn.current === step) return;
    drawn.current = step;
    place.current!.querySelector('[data-state="now"]')?.scrollIntoView({ block: "nearest" });
  }, [step]);
  return (
    <div class="picture" ref={place} style={{ "--ranks": columns }}>
      <div class="ranks" role="group" aria-label="Rank to look at">
        <span class="row-label small quiet">
          {split.tp > columns ? `Ranks ${first}–${first + columns - 1} of ${split.tp}` : plural(split.tp, "rank")}
        </span>
        {shown.map((each) => (
          <button
            key={each}
            type="button"
            class="rank-button"
            aria-pressed={each === rank}
            onClick={() => props.choose(each)}
          >
            <strong>Rank {each}</strong> <span class="small">{bytes(split.ranks[each]!.weight_bytes)}</span>
          </button>
        ))}
      </div>
      <ol class="stages" aria-label={`Layer ${split.layer}, stage by stage`}>
        {stages.map((stage, index) => (
          <li
            key={stage.key}
            class="stage"
            data-stage={stage.key}
            data-state={step === null ? "shown" : index === step ? "now" : index < step ? "past" : "ahead"}
          >
            <button
              type="button"
              class="row-label stage-label"
              aria-current={index === step ? "step" : undefined}
              onClick={() => props.goTo(index)}
            >
              <span class="count">{index + 1}</span> {stage.title}
            </button>
            {stage.drawing === "sum" ? (
              <Sum split={split} columns={columns} />
            ) : (
              shown.map((each) => <Cell key={each} stage={stage} split={split} rank={each} focused={each === rank} />)
            )}
          </li>
        ))}
      </ol>
    </div>
  );
}

function Sum(props: { split: Split; columns: number }) {
  const { tp, all_reduce: sum } = props.split;
  const text = `sum over ${tp} ranks · ${bytes(sum.bytes)} · ${seconds(sum.seconds)}`;
  return (
    <>
      {Array.from({ length: props.columns }, (_, column) => (
        <span key={column} class="join" style={{ gridColumn: column + 2 }} />
      ))}
      <div class="sum-band">{tp === 1 ? "one rank: nothing to add" : text}</div>
    </>
  );
}

function Cell(props: { stage: Stage; split: Split; rank: number; focused: boolean }) {
  const { stage, split, rank } = props;
  return (
    <div class={props.focused ? "cell focused" : "cell"} data-rank={rank}>
      {stage.drawing === "same" && <div class="slab whole">{activations(split)}</div>}
      {stage.drawing === "partial" && <div class="slab partial">partial {activations(split)}</div>}
      {stage.drawing === "heads" && <Heads split={split} rank={rank} />}
      {stage.drawing === "columns" && <Columns split={split} rank={rank} />}
      {stage.drawing === "share" && <ShareBar stage={stage} split={split} rank={rank} />}
    </div>
  );
}

const sizeOf = (dealt: Dealt, rank: number): number => dealt.shares[rank]![1] - dealt.shares[rank]![0];

const largest = (dealt: Dealt): number => Math.max(...dealt.shares.map((_, rank) => sizeOf(dealt, rank)));

/** More or less than others, in words: colour alone would not say it. */
function Uneven(props: { dealt: Dealt; rank: number }) {
  const { dealt, rank } = props;
  if (!dealt.uneven) return null;
  const size = sizeOf(dealt, rank);
  return <span class="tag warn">{size === 0 ? "idle here" : size === largest(dealt) ? "uneven: more" : "uneven: less"}</span>;
}

/** Whole heads. A KV head stands before the query heads that share it. */
function Heads(props: { split: Split; rank: number }) {
  const { split, rank } = props;
  const name = mixerHeads(split);
  const dealt = split.dealt[name]!;
  const own = dealt.shares[rank]!;
  if (name === "state_heads") {
    const group = split.model.state_value_heads / split.model.state_heads;
    return (
      <>
        <Groups count={own[1] - own[0]} first="kv" start={own[0] * group} rest={group} />
        <p class="share-note">
          heads {span(own)} <Uneven dealt={dealt} rank={rank} />
        </p>
      </>
    );
  }
  const kv = split.dealt.kv_heads!;
  const shared = split.ranks[rank]!.kv_shared_with;
  const copied = kv.replicated && shared.length > 0;
  const latent = kindOf(split).mixer === "latent";
  const held = sizeOf(kv, rank);
  return (
    <>
      <Groups count={held} first={copied ? "kv copied" : "kv"} start={own[0]} rest={(own[1] - own[0]) / held} />
      <p class="share-note">
        Q {span(own)} {!latent && `· KV ${span(kv.shares[rank]!)}`} <Uneven dealt={dealt} rank={rank} />
        {copied && <span class="tag">{latent ? "latent on every rank" : `KV also on ${named(shared)}`}</span>}
      </p>
    </>
  );
}

const named = (ranks: number[]): string =>
  ranks.length > 3 ? plural(ranks.length, "other rank") : `rank ${ranks.join(", ")}`;

function Groups(props: { count: number; first: string; start: number; rest: number }) {
  const { rest } = props;
  const numbered = props.count * rest <= MOST_NUMBERED;
  return (
    <div class={numbered ? "heads numbered" : "heads"} aria-hidden="true">
      {Array.from({ length: props.count }, (_, group) => (
        <span key={group} class="group">
          <span class={`head-cell ${props.first}`} />
          {Array.from({ length: rest }, (_, query) => (
            <span key={query} class="head-cell q">
              {numbered && props.start + group * rest + query}
            </span>
          ))}
        </span>
      ))}
    </div>
  );
}

/** Columns of the FFN in proportion, each unit a tick; of experts, the slice of each that is held here. */
function Columns(props: { split: Split; rank: number }) {
  const { split, rank } = props;
  const name = columnsOf(split);
  const dealt = split.dealt[name]!;
  const [start, stop] = dealt.shares[rank]!;
  const units = Math.ceil((stop - start) / dealt.unit);
  const shared = split.dealt.shared_ffn;
  return (
    <>
      {name === "expert_ffn" ? (
        <Experts dealt={dealt} rank={rank} count={split.model.experts} />
      ) : (
        <div class="track">
          <div class="slab ffn" style={{ width: `${((stop - start) / largest(dealt)) * 100}%`, "--units": Math.max(units, 1) }} />
        </div>
      )}
      <p class="share-note">
        {dealt.blocks ? plural(units, "block") : `${units} × ${dealt.unit}`} = {plural(stop - start, "column")}
        {name === "expert_ffn" && <span>of each of {split.model.experts} experts</span>}
        {name === "expert_ffn" && shared && <span>and {sizeOf(shared, rank)} of the shared one</span>}
        <Uneven dealt={dealt} rank={rank} />
      </p>
    </>
  );
}

function Experts(props: { dealt: Dealt; rank: number; count: number }) {
  const [start, stop] = props.dealt.shares[props.rank]!;
  const from = `${(start / props.dealt.total) * 100}%`;
  const to = `${(stop / props.dealt.total) * 100}%`;
  return (
    <div class="experts" aria-hidden="true" style={{ "--from": from, "--to": to }}>
      {Array.from({ length: Math.min(props.count, MOST_EXPERTS) }, (_, expert) => (
        <span key={expert} class="expert" />
      ))}
      {props.count > MOST_EXPERTS && <span class="more">+{props.count - MOST_EXPERTS}</span>}
    </div>
  );
}

/** A rank's share of the result, in proportion to the largest. */
function ShareBar(props: { stage: Stage; split: Split; rank: number }) {
  const { split, rank } = props;
  const name = props.stage.dealt!;
  const dealt = split.dealt[name]!;
  const size = sizeOf(dealt, rank);
  const text = name.endsWith("heads") ? plural(size, "head") : shape(columnsResult(split, name, size));
  return (
    <div class="track">
      <div class={name.endsWith("heads") ? "slab share" : "slab share ffn-share"} style={{ width: `${(size / largest(dealt)) * 100}%` }} />
      <span class="over">{text}</span>
    </div>
  );
}
