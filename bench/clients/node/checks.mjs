// What all programs here share.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { readFileSync } from "node:fs";
import path from "node:path";

export const URL_ = process.env.TIDEWAY_URL;
export const V1 = `${URL_}/v1`;
export const MODEL = process.env.TIDEWAY_MODEL;
export const ASKED = "What is a compiler?";
export const CITIES = ["Rome", "Oslo"];
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES } },
  required: ["city"],
  additionalProperties: false,
};
const called = [];

export function weather({ city }) {
  called.push(city);
  return "Rain";
}

export function assert(is, told = "it does not hold") {
  if (!is) throw new Error(told);
}

export function wasCalled() {
  assert(called.length > 0 && called.every((city) => CITIES.includes(city)), `called with ${JSON.stringify(called)}`);
}

const modules = process.env.NODE_MODULES;
const require = createRequire(path.join(modules, "checks.cjs"));

export async function load(...names) {
  try {
    return await Promise.all(names.map((name) => import(pathToFileURL(require.resolve(name)).href)));
  } catch (error) {
    console.log(JSON.stringify({ absent: error.message.split("\n")[0] }));
    process.exit(0);
  }
}

export async function check(name, checks) {
  const told = { version: JSON.parse(readFileSync(path.join(modules, name, "package.json"))).version };
  for (const [what, run] of Object.entries(checks)) {
    called.length = 0;
    try {
      await run();
      told[what] = "ok";
    } catch (error) {
      told[what] = String(error.stack ?? error).slice(0, 700);
    }
  }
  console.log(`\n${JSON.stringify(told)}`);
  process.exit(0);
}
