/** Texts that the browser keeps for this server's pages. Where it keeps none, nothing is kept and nothing fails. */
export class Keeper {
  /** Asking for the storage may fail, not only using it. */
  constructor(private readonly storage: () => Storage) {}

  get(name: string): string | null {
    return this.tried((storage) => storage.getItem(name));
  }

  /** Whether there was room for it. */
  set(name: string, text: string): boolean {
    return this.tried((storage) => (storage.setItem(name, text), true)) ?? false;
  }

  remove(name: string): void {
    this.tried((storage) => storage.removeItem(name));
  }

  names(): string[] {
    return this.tried((storage) => Object.keys(storage)) ?? [];
  }

  private tried<T>(use: (storage: Storage) => T): T | null {
    try {
      return use(this.storage());
    } catch {
      return null;
    }
  }
}

/** For as long as the tab is open, and in it alone. */
export const ofTab = new Keeper(() => sessionStorage);

/** Until it is deleted, in all tabs. */
export const ofBrowser = new Keeper(() => localStorage);
