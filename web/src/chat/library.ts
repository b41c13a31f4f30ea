import { useEffect, useState } from "preact/hooks";
import { ofBrowser } from "../storage";
import type { Turn } from "./turn";

/** A conversation as it is kept: all but the probabilities of its tokens. */
export interface Saved {
  id: string;
  title: string;
  changed: number;
  model: string;
  system: string;
  turns: Omit<Turn, "tokens">[];
}

export type Heading = Pick<Saved, "id" | "title" | "changed">;

const PREFIX = "phalanx.chat.";
const MOST = 50;
const MOST_CHARACTERS = 3_000_000;

/** Conversations that this browser keeps, the newest first. They are sent nowhere; when there are too many, or no room
 * for them, the oldest go. Each has an entry of its own, so that tabs do not write over each other's. */
class Library {
  headings: Heading[] = [];
  private listeners = new Set<() => void>();

  constructor() {
    this.look();
    addEventListener("storage", () => this.look());
  }

  listen(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Whether there was room for it. */
  save(given: Saved): boolean {
    const name = PREFIX + given.id;
    const text = JSON.stringify(given);
    const others = this.headings.filter((heading) => heading.id !== given.id);
    let room = MOST_CHARACTERS - text.length;
    for (const [index, { id }] of others.entries()) {
      room -= ofBrowser.get(PREFIX + id)?.length ?? 0;
      if (index >= MOST - 1 || room < 0) ofBrowser.remove(PREFIX + id);
    }
    const fits = text.length <= MOST_CHARACTERS;
    const kept = fits && (ofBrowser.set(name, text) || (this.dropOldest(others), ofBrowser.set(name, text)));
    if (!kept) ofBrowser.remove(name);
    this.look();
    return kept;
  }

  open(id: string): Saved | null {
    return parsed(ofBrowser.get(PREFIX + id));
  }

  rename(id: string, title: string): void {
    const found = this.open(id);
    if (found) this.save({ ...found, title });
  }

  remove(id: string): void {
    ofBrowser.remove(PREFIX + id);
    this.look();
  }

  /** Half of them: the browser has less room than we thought. */
  private dropOldest(headings: Heading[]): void {
    for (const { id } of headings.slice(Math.floor(headings.length / 2))) ofBrowser.remove(PREFIX + id);
  }

  private look(): void {
    this.headings = ofBrowser
      .names()
      .filter((name) => name.startsWith(PREFIX))
      .flatMap((name) => parsed(ofBrowser.get(name)) ?? [])
      .map(({ id, title, changed }) => ({ id, title, changed }))
      .sort((one, other) => other.changed - one.changed);
    for (const listener of [...this.listeners]) listener();
  }
}

function parsed(text: string | null): Saved | null {
  try {
    const found = JSON.parse(text ?? "null") as Saved | null;
    return typeof found?.id === "string" && Array.isArray(found.turns) ? found : null;
  } catch {
    return null;
  }
}

export const library = new Library();

export function useLibrary(): Library {
  const [, redraw] = useState(0);
  useEffect(() => library.listen(() => redraw((count) => count + 1)), []);
  return library;
}
