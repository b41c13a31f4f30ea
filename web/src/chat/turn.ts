import { ApiError } from "../api";

/** A token of an answer, and those that were likely in its place. */
export interface Token {
  text: string;
  logprob: number;
  top: { text: string; logprob: number }[];
}

/** A call the model wrote; `result` is what the user will give back for it. */
export interface Call {
  id: string;
  name: string;
  arguments: string;
  result: string;
}

/** One message. Turns change in place while they stream; `version` counts the changes. */
export interface Turn {
  key: number;
  version: number;
  role: "user" | "assistant" | "tool";
  text: string;
  reasoning: string;
  calls: Call[];
  tokens: Token[];
  callId: string;
  error: string;
  finish: "" | "stop" | "length" | "tool_calls" | "stopped";
  sentAt: number;
  firstAt: number;
  lastAt: number;
  usage: { prompt: number; cached: number; output: number } | null;
  /** Tokens that came with the first chunk: the time to it is not theirs to share. */
  firstOutput: number;
}

interface Entry {
  token: string;
  logprob: number;
  bytes: number[] | null;
}

export interface Chunk {
  error?: { message: string; code?: string };
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } };
  choices?: {
    finish_reason: Turn["finish"] | null;
    delta: {
      content?: string | null;
      reasoning_content?: string | null;
      reasoning?: string | null;
      tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
    };
    logprobs?: { content?: (Entry & { top_logprobs: Entry[] })[] | null } | null;
  }[];
}

export function newTurn(key: number, role: Turn["role"], text: string, callId = ""): Turn {
  const nothing = { reasoning: "", error: "", finish: "", sentAt: 0, firstAt: 0, lastAt: 0, firstOutput: 0 } as const;
  return { key, version: 0, role, text, callId, calls: [], tokens: [], usage: null, ...nothing };
}

/** Tokens a second since the first ones came; null while that cannot be known. */
export function rateOf(turn: Turn): number | null {
  const seconds = (turn.lastAt - turn.firstAt) / 1000;
  const tokens = (turn.usage?.output ?? 0) - turn.firstOutput;
  return tokens > 0 && seconds > 0 ? tokens / seconds : null;
}

/** What a chunk of the stream adds to an answer. */
export function take(turn: Turn, chunk: Chunk, decoder: TextDecoder): void {
  if (chunk.error) throw new ApiError(0, chunk.error.code ?? "error", chunk.error.message);
  if (chunk.usage)
    turn.usage = {
      prompt: chunk.usage.prompt_tokens,
      cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
      output: chunk.usage.completion_tokens,
    };
  const choice = chunk.choices?.[0];
  if (!choice) return;
  turn.lastAt = performance.now();
  if (!turn.firstAt) turn.firstOutput = turn.usage?.output ?? 1;
  turn.firstAt ||= turn.lastAt;
  turn.text += choice.delta.content ?? "";
  turn.reasoning += choice.delta.reasoning_content ?? choice.delta.reasoning ?? "";
  for (const part of choice.delta.tool_calls ?? []) {
    const call = (turn.calls[part.index] ??= { id: "", name: "", arguments: "", result: "" });
    call.id ||= part.id ?? "";
    call.name ||= part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  for (const entry of choice.logprobs?.content ?? [])
    turn.tokens.push({
      text: entry.bytes ? decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token,
      logprob: entry.logprob,
      top: entry.top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
    });
  turn.finish = choice.finish_reason ?? turn.finish;
}

/** The messages as the API takes them; answers that never came are left out. */
export function messagesOf(turns: Omit<Turn, "tokens">[]): object[] {
  return turns
    .filter((turn) => turn.role !== "assistant" || turn.text || turn.calls.length)
    .map((turn) => {
      if (turn.role === "user") return { role: "user", content: turn.text };
      if (turn.role === "tool") return { role: "tool", tool_call_id: turn.callId, content: turn.text };
      if (!turn.calls.length) return { role: "assistant", content: turn.text };
      return {
        role: "assistant",
        content: turn.text || null,
        reasoning_content: turn.reasoning || undefined,
        tool_calls: turn.calls.map((call) => ({
          id: call.id,
          type: "function",
          function: { name: call.name, arguments: call.arguments },
        })),
      };
    });
}
