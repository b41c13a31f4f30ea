import type { EngineState, Link } from "./stream";

interface Told {
  tone: "good" | "warn" | "bad" | "quiet";
  mark: string;
  headline: string;
  detail: string;
  loaded?: number | null;
}

/** How things stand, in one place that is always there. */
export function Status(props: { link: Link; state: EngineState | null; tp: number }) {
  const told = tell(props.link, props.state, props.tp);
  const alarming = told.tone === "bad";
  return (
    <section class={`live-status ${told.tone}`} aria-label="State of the engine">
      <span class="mark" aria-hidden="true">
        {told.mark}
      </span>
      <div class="words" role={alarming ? "alert" : "status"}>
        <p class="headline">{told.headline}</p>
        <p class="detail">{told.detail}</p>
      </div>
      {told.loaded != null && <progress value={told.loaded} max={1} aria-label="Weights loaded" />}
    </section>
  );
}

function tell(link: Link, state: EngineState | null, tp: number): Told {
  if (link === "refused")
    return bad("The server no longer takes this key", "Reload the page and log in with the key it has now.");
  if (link === "lost") {
    const before = state?.reason ? ` Before that: ${reasonOf(state)}` : " This page comes back by itself.";
    return bad("The server does not answer, trying again", before.trim());
  }
  if (state === null) return { tone: "quiet", mark: "…", headline: "Connecting", detail: "Asking the server for its last ten minutes." };
  return toldBy(state, tp);
}

function toldBy(state: EngineState, tp: number): Told {
  const stuck = state.ranks.filter((rank) => rank.stuck).map((rank) => rank.rank);
  switch (state.status) {
    case "starting":
      return { tone: "warn", mark: "…", headline: `Starting${loadedOf(state)}`, detail: "It takes requests once all ranks are there.", loaded: state.loaded };
    case "restarting":
      return {
        ...bad(`The engine died and is started again${loadedOf(state)}`, `${reasonOf(state)} ${restartsOf(state)}`),
        loaded: state.loaded,
      };
    case "dead":
      return bad("The engine is dead, the server ends", reasonOf(state));
    case "draining":
      return { tone: "warn", mark: "…", headline: "Stopping", detail: `${requestsOf(state)} may finish; no more are taken.` };
    case "stuck":
      return bad(
        `Rank ${stuck.join(", ")} ${stuck.length > 1 ? "are" : "is"} stuck`,
        state.reason ? reasonOf(state) : "Requests wait. If it does not move, the engine is ended and the reason told here.",
      );
    case "ready":
      return { tone: "good", mark: "✓", headline: "Ready", detail: factsOf(state, tp) };
  }
}

const bad = (headline: string, detail: string): Told => ({ tone: "bad", mark: "!", headline, detail });

const reasonOf = (state: EngineState): string =>
  state.reason ? `${state.reason.found} ${state.reason.fix}` : "It left no reason; see the server's log.";

const loadedOf = (state: EngineState): string =>
  state.loaded === null ? "" : `: ${Math.round(state.loaded * 100)} % of the weights loaded`;

const restartsOf = (state: EngineState): string =>
  state.restarts_left === 1 ? "One more restart is allowed." : `${state.restarts_left} more restarts are allowed.`;

const requestsOf = (state: EngineState): string => (state.requests === 1 ? "One request" : `${state.requests} requests`);

function factsOf(state: EngineState, tp: number): string {
  const device = state.device === "cpu" ? "CPU" : (state.device ?? "unknown device");
  const facts = [
    tp > 1 ? `${tp} ranks on ${device}` : `One rank on ${device}`,
    `up to ${state.max_num_seqs?.toLocaleString("en-US")} requests at once`,
    `KV cache of ${state.kv_tokens?.toLocaleString("en-US")} tokens`,
  ];
  return `${facts.join(" · ")}.`;
}
