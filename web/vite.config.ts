import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { defineConfig, type Plugin } from "vite";

const SOURCES = ["index.html", "package-lock.json", "src", "tsconfig.json", "vite.config.ts"];

/** Files below a path in order of their names, with forward slashes. */
function filesOf(path: string): string[] {
  try {
    const names = readdirSync(path, { recursive: true, withFileTypes: true });
    return names.filter((entry) => entry.isFile()).map((entry) => join(entry.parentPath, entry.name));
  } catch {
    return [path];
  }
}

/** Leaves the digest of what was built beside it: a test holds it against the sources. */
function writeDigest(): Plugin {
  return {
    name: "digest",
    generateBundle() {
      const digest = createHash("sha256");
      for (const file of SOURCES.flatMap(filesOf).sort()) digest.update(`${file}\n`).update(readFileSync(file));
      this.emitFile({ type: "asset", fileName: "sources.sha256", source: `${digest.digest("hex")}\n` });
    },
  };
}

/** One script and one style sheet under plain names: they are committed, so their names must not change with them. */
export default defineConfig({
  base: "./",
  plugins: [writeDigest()],
  build: {
    outDir: "../src/phalanx/web/static",
    emptyOutDir: true,
    modulePreload: false,
    assetsInlineLimit: 0,
    chunkSizeWarningLimit: 400,
    rollupOptions: {
      output: {
        entryFileNames: "cockpit.js",
        assetFileNames: "cockpit.[ext]",
      },
    },
  },
});
